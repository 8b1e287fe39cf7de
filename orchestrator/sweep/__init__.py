"""Use cases that measure: the sweep, the search for the largest cell, imported traces."""
