"""Contract of measuring and orchestrating: axes, cells, attempts, rows. Imports no torch."""
