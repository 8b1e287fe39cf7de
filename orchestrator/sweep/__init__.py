"""Use cases that measure: the sweep itself, the search for the largest cell that fits, and imported traces."""
