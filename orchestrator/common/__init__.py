"""Base helpers for the whole orchestrator: errors, files, text, digests, provenance."""
