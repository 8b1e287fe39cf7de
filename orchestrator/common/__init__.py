"""Helpers for everything else here: errors, text, hashing, the user's cache. Imports nothing else of orchestrator."""
