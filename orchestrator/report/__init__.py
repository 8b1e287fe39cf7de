"""Presents derived cells: tables, charts, one page, and files in several formats."""
