"""From a snapshot of the CUDA allocator to rows: what the peak of a step is made of, and what lives when.

    snapshot (a dict, as torch.cuda.memory gives it) ─replay→ Record ─attribute→ [Labelled] ─summarise→ [AllocationRow], [LiveRow]

Needs no torch, and never unpickles: it works where the snapshot was taken, in the process that took it.
"""
