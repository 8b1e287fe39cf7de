"""The life of a measuring process: fork server, lifeline, journal, CPU pinning."""
