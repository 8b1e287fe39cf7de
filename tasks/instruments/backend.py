"""Which attention backend really ran, by the names of its kernels: what was asked for is not always what one gets.

torch chooses among several, and its compiler may put a fused kernel in place of attention written out. One step is
profiled for it, after everything else, since a process is slower once it has profiled.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch.autograd import DeviceType  # type: ignore[attr-defined]  # it is where torch's own profiler takes it from
from torch.profiler import ProfilerActivity, profile

from tasks.harness.stage import Session, Stage
from tasks.spec.tables import Sample

_BACKENDS = {  # in this order: the names of cuDNN's and Flex's kernels hold "flash" and "attention" as well
    "cudnn": r"cudnn.*(sdpa|flash|mha|fort)",
    "flex": r"flex_attention",
    "efficient": r"fmha_|efficient_attention",
    "flash": r"flash_fwd|flash_bwd|flash_attention_for_cpu|_flash_attention|FlashAtt",
}
_SHOWN = 4


def see_backend(session: Session) -> list[Sample]:
    """Leaves the facts `attention_seen` and `attention_kernels`. Plain eager attention asks nothing of a backend."""
    asked = session.workload.facts.get("attention_asked")
    if asked is None or (asked == "naive" and not session.workload.compiled):
        return []
    on_gpu = session.workload.device.kind == "cuda"
    with profile(
        activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    ) as profiled:
        session.step()
        session.workload.device.synchronize()
    here = (
        DeviceType.CUDA if on_gpu else DeviceType.CPU
    )  # else the names of CUDA's API, which says nothing of a backend
    names = [event.name for event in profiled.events() if event.device_type == here]
    seen, telling = classify(names)
    session.facts |= {
        "attention_seen": seen,
        "attention_kernels": "; ".join((telling or list(dict.fromkeys(names)))[:_SHOWN]),
    }
    return [Sample("backend", "events", "events", len(names))]


def classify(names: Sequence[str]) -> tuple[str | None, list[str]]:
    """The backends that the names belong to, `none known` if to none, null if nothing was seen; and the names that tell."""
    backends: dict[str, None] = {}
    telling: dict[str, None] = {}
    for name in names:
        backend = next(
            (backend for backend, sign in _BACKENDS.items() if re.search(sign, name)), None
        )
        if backend is not None:
            backends[backend] = telling[name] = None
    return "+".join(backends) or ("none known" if names else None), list(telling)


STAGES = (Stage("attention backend", 90, see_backend),)
