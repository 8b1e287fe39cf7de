"""Numbers that others published, and the cells of ours that answer them."""
