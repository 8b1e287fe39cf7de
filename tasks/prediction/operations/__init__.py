"""Single torch operations without data: their results and FLOPs, and the memory of their kernels.

Each call of torch in a tracked step is answered here as a GPU would answer it.
"""
