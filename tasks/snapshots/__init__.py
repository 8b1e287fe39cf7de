"""Turn a snapshot of the CUDA allocator into rows: parts of the peak, and live bytes over time.

    snapshot (a dict of torch.cuda.memory) ─replay→ Record ─attribute→ [Labelled]
        ─summarise→ [AllocationRow], [LiveRow]

The package does not import torch and never unpickles: it runs in the process that took the
snapshot.
"""
