"""Runs one attempt in one child process on the host of a cell, within its limits, and collects its outcome."""
