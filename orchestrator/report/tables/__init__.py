"""The tables of a report: which cells, which rows and columns, and how a value is formatted."""
