"""Detect the attention backend of a step from the names of its kernels.

The backend that ran may differ from the one that the cell names: torch chooses among several,
and torch.compile may replace hand-written attention by a fused kernel.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from tasks.harness.stage import Session, Stage
from tasks.spec.tables import Sample

# The order matters: names of cuDNN's and Flex's kernels also contain "flash" and "attention".
_BACKENDS = {
    "cudnn": r"cudnn.*(sdpa|flash|mha|fort)",
    "flex": r"flex_attention",
    "efficient": r"fmha_|efficient_attention",
    "flash": r"flash_fwd|flash_bwd|flash_attention_for_cpu|_flash_attention|FlashAtt",
}
_SHOWN = 4


def see_backend(session: Session) -> list[Sample]:
    """Set the facts `attention_seen` and `attention_kernels`.

    Eager naive attention uses no backend, so nothing is profiled.
    """
    asked = session.workload.facts.get("attention_asked")
    if asked is None or (asked == "naive" and not session.workload.compiled):
        return []
    activity, here = ProfilerActivity.CPU, DeviceType.CPU
    if session.workload.device.kind == "cuda":
        activity, here = ProfilerActivity.CUDA, DeviceType.CUDA
    with profile(activities=[activity]) as profiled:
        session.step()
        session.workload.device.synchronize()
    # Host events are names of CUDA's API, which do not show the backend.
    names = [event.name for event in profiled.events() if event.device_type == here]
    seen, matching = classify(names)
    shown = (matching or list(dict.fromkeys(names)))[:_SHOWN]
    session.facts |= {"attention_seen": seen, "attention_kernels": "; ".join(shown)}
    return [Sample("backend", "events", "events", len(names))]


def classify(names: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the backends that the kernel names belong to, and the names that show it.

    The first is `none known` if no name belongs to a backend, and None if there are no names.
    """
    backends: dict[str, None] = {}
    matching: dict[str, None] = {}
    for name in names:
        for backend, pattern in _BACKENDS.items():
            if re.search(pattern, name):
                backends[backend] = matching[name] = None
                break
    return "+".join(backends) or ("none known" if names else None), list(matching)


# After all other stages, because a process is slower once it has profiled.
STAGES = (Stage("attention backend", 90, see_backend),)
