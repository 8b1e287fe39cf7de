"""Predicts the peak memory of a training step on a GPU, on a machine without one.

A cell's own build and step run on torch's `meta` device, where a tensor has a shape and no data. What they allocate and
release, in its order, is the trace; torch's caching allocator, modelled, turns that into what the allocator of a GPU
would count. `trace`, `allocator` and `records` import no torch.

    params ─track→ Trace ─replay(CachingAllocator)→ Replay ─→ Prediction
"""
