"""Durations, sizes and cell counts as short texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.spec.cell import in_a_line

_LONGEST_REASON = 160  # letters
_GIB, _MIB = 1024**3, 1024**2


def cell_count(count: int) -> str:
    return f"{count} cell{'' if count == 1 else 's'}"


def format_seconds(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def where_it_ended(stage: str, phase: str) -> str:
    return "/".join(filter(None, [stage, phase]))


def why_it_ended(evidence: Mapping[str, Any]) -> str:
    """What memory was asked for in vain, where the evidence has its size; else the first line of what it says, if need be cut.

    torch says the same in a paragraph, of which a line has the beginning alone.
    """
    if isinstance(evidence.get("asked_bytes"), int):
        return _refused(evidence)
    said = in_a_line(str(evidence.get("reason") or evidence.get("message") or "").split("\n")[0])
    return said if len(said) <= _LONGEST_REASON else f"{said[: _LONGEST_REASON - 1]}…"


def _refused(evidence: Mapping[str, Any]) -> str:
    asked, limit, free, total = (
        evidence.get(f"{name}_bytes") for name in ("asked", "limit", "free", "total")
    )
    said = f"out of memory: asked for {_size(asked)}"
    if limit and limit <= (total or limit):
        return f"{said}, limit {_size(limit)}"
    return f"{said}, {_size(free)} of {_size(total)} free" if free is not None and total else said


def _size(nbytes: Any) -> str:
    if nbytes < _MIB:
        return f"{nbytes:,} bytes"
    return f"{nbytes / _GIB:.4g} GiB" if nbytes >= _GIB else f"{nbytes / _MIB:.4g} MiB"
