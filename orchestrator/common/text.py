"""Short texts that several packages print: durations, sizes, cell counts, reasons of failures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.spec.cell import escape_unprintable

_LONGEST_REASON = 160  # characters
_GIB, _MIB = 1024**3, 1024**2


def cell_count(count: int) -> str:
    """Return "1 cell" or "3 cells"."""
    return "1 cell" if count == 1 else f"{count} cells"


def format_seconds(seconds: float) -> str:
    """Return a duration such as "12 s", "3 min 05 s" or "2 h 10 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def end_location(stage: str, phase: str) -> str:
    """Return where an attempt ended, such as "measure/backward"."""
    return "/".join(filter(None, [stage, phase]))


def failure_reason(evidence: Mapping[str, Any]) -> str:
    """Return in one line why an attempt failed, from the evidence in its row.

    An allocation that failed is described by its size. torch's own message for it is a paragraph
    whose first line names neither the limit nor the free memory.
    """
    if isinstance(evidence.get("asked_bytes"), int):
        return _failed_allocation(evidence)
    message = str(evidence.get("reason") or evidence.get("message") or "")
    reason = escape_unprintable(message.split("\n")[0])
    if len(reason) <= _LONGEST_REASON:
        return reason
    return f"{reason[: _LONGEST_REASON - 1]}…"


def _failed_allocation(evidence: Mapping[str, Any]) -> str:
    limit, free, total = (evidence.get(f"{name}_bytes") for name in ("limit", "free", "total"))
    reason = f"out of memory: asked for {_size(evidence['asked_bytes'])}"
    # A limit above the GPU's memory was not what stopped the allocation.
    if limit and limit <= (total or limit):
        return f"{reason}, limit {_size(limit)}"
    if free is not None and total:
        return f"{reason}, {_size(free)} of {_size(total)} free"
    return reason


def _size(nbytes: float) -> str:
    if nbytes < _MIB:
        return f"{nbytes:,} bytes"
    if nbytes < _GIB:
        return f"{nbytes / _MIB:.4g} MiB"
    return f"{nbytes / _GIB:.4g} GiB"
