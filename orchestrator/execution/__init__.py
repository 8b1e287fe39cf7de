"""Runs one attempt: child processes, their limits, and how they ended."""
