"""Turn the trace of a few steps into rows: the time of each kernel by phase, module and class.

    chrome (torch.profiler), nsys ─read→ Timeline ─attribute→ [Work]
        ─summarise→ [KernelRow], [Sample]

The package does not import torch, so that any machine can read a trace.
"""
