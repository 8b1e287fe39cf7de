"""The command line: Click commands and the text that they print."""
