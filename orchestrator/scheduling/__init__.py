"""Decides where attempts run: one after another in this process, or on the slots of a Ray cluster."""
