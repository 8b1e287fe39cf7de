"""Clocks of the measuring process. It imports them before any model, which might replace them."""

from time import monotonic, perf_counter_ns, process_time_ns

__all__ = ["monotonic", "perf_counter_ns", "process_time_ns"]
