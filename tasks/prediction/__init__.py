"""Predicts the peak memory of a training step on a GPU, on a machine without one.

The cell's build and step run on torch's `meta` device, where a tensor has a shape but no data. The
order in which they allocate and release storages is the trace. A model of torch's caching allocator
turns the trace into the statistics that a GPU would report. `trace`, `allocator` and `records`
import no torch.

    params ─track→ Trace ─replay(CachingAllocator)→ Replay ─→ Prediction
"""
