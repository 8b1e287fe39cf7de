"""Rendered tables as Markdown, CSV, LaTeX and Typst."""
