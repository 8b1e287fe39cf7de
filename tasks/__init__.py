"""Tasks, one in each file, their instruments, and the `harness` that both use."""
