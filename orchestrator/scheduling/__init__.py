"""Decides where attempts run: one after another in this process, or on GPUs through Ray."""
