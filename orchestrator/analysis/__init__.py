"""Numbers from stored results: one derived row per cell, and comparisons. Produces frames, no text."""
