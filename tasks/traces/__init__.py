"""From a trace of a few steps to rows: which kernel ran for how long, in which phase, for which module, of which class.

    chrome (torch.profiler), nsys ─read→ Timeline ─attribute→ [Work] ─summarise→ [KernelRow], [Sample]

Needs no torch: a trace from elsewhere is read on any machine.
"""
