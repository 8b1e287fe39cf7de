"""Decides what to measure, in which order and for how long, from the cells and their earlier attempts."""
