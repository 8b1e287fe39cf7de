"""Sentences of a report, worded from the data."""
