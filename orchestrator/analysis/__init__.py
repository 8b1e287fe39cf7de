"""Numbers from stored results: one derived row per cell, and comparisons. Makes no text."""
