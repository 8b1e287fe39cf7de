"""Facts about machines: GPU models, NVML, CPU cores. Needs neither torch nor Ray."""
