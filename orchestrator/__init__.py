"""Everything around a cell: what to measure, where, how it ended, where it is kept, and what is made of it."""
