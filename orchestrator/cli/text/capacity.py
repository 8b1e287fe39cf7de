"""The table that `sweep max-context` and `sweep max-batch` print."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from orchestrator.config.grid import Expansion
from orchestrator.planning.memory_prediction import cap_bytes
from orchestrator.planning.request import SweepRequest
from orchestrator.sweep.capacity_limits import Bounds, Found, Limit, Search
from tasks.prediction.records import MARGIN

_GIB = 1024**3


def describe_limits(request: SweepRequest, found: Found, bounds: Bounds) -> Iterator[str]:
    """A row a group: what is predicted, what was measured, and what is to be said of it."""
    from tabulate import tabulate

    groups = found.groups
    cells = Expansion(tuple(group.at(bounds.granularity) for group in groups))
    measured_gib = _measured_gib(request) if any(group.measured for group in groups) else {}
    header = [
        "cell", f"{bounds.axis} fits up to", "peak GiB", "reserved GiB", "of GiB", "OOM from", "its peak GiB",
        "measured up to", "measured GiB", "OOM at", "note",
    ]  # fmt: skip
    rows = [
        [
            cells.label(cell),
            *_predicted(group, cap_bytes(cell, found.gpu)),
            *_measured(group, measured_gib),
            _remark(group, bounds),
        ]
        for group, cell in zip(groups, cells.cells, strict=True)
    ]
    kept = [place for place in range(len(header)) if any(row[place] for row in rows)]
    yield tabulate(
        [[row[place] for place in kept] for row in rows],
        [header[place] for place in kept],
        disable_numparse=True,
    )
    if any(_is_undecided_between(group, bounds) for group in groups):
        undecided = f"predicted within {100 * MARGIN:g} % of the limit, undecided"
        yield f"between `fits up to` and `OOM from`: {undecided}; on the GPU itself --confirm measures it"


def _is_undecided_between(group: Limit, bounds: Bounds) -> bool:
    """Whether something was tried neither by measuring nor by a prediction that is sure of it."""
    fails = group.perhaps.fails if group.perhaps is not None else None
    return (
        group.measured is None
        and fails is not None
        and fails - group.surely.fits > bounds.granularity
    )


def _predicted(group: Limit, cap: int | None) -> list[str]:
    fits = group.surely.fits
    fails = group.perhaps.fails if group.perhaps is not None else None
    return [
        str(fits or ""),
        _peak_gib(group, fits),
        _reserved_gib(group, fits, cap),
        f"{cap / _GIB:.2f}" if cap and group.predictions else "",
        str(fails or ""),
        _peak_gib(group, fails),
    ]


def _reserved_gib(group: Limit, value: int | None, cap: int | None) -> str:
    """Where the device has less than the allocator would keep, it gives the rest back."""
    with_room = _peak_gib(group, value, "peak_reserved_bytes")
    prediction = group.predictions.get(value or 0)
    reserved = prediction.peak_bytes("peak_reserved_bytes") if prediction else None
    return (
        f"{cap / _GIB:.2f} ({with_room} with room)"
        if cap and reserved and reserved > cap
        else with_room
    )


def _peak_gib(group: Limit, value: int | None, metric: str = "peak_allocated_bytes") -> str:
    prediction = group.predictions.get(value or 0)
    if prediction is None:
        return ""
    peak, least = prediction.peak_bytes(metric), prediction.least_bytes()
    return f"{peak / _GIB:.2f}" if peak else f"≥ {least / _GIB:.2f}" if least else ""


def _measured(group: Limit, measured_gib: Mapping[str, float]) -> list[str]:
    if group.measured is None:
        return ["", "", ""]
    fits = group.measured.fits
    peak = measured_gib.get(group.at(fits).id) if fits else None
    return [str(fits or ""), f"{peak:.2f}" if peak else "", str(group.measured.fails or "")]


def _measured_gib(request: SweepRequest) -> dict[str, float]:
    """The peak of each cell that was measured: of the allocator, or on the CPU of the process."""
    from orchestrator.analysis.results import load_results

    cells = load_results(request.run).cells if request.run.exists else None
    names = (
        []
        if cells is None
        else [name for name in ("peak_allocated_bytes", "peak_rss_bytes") if name in cells]
    )
    if cells is None or not names:
        return {}
    peaks = cells.set_index("cell")[names].bfill(axis=1).iloc[:, 0].dropna()
    return {str(cell): float(nbytes) / _GIB for cell, nbytes in peaks.items()}


def _remark(group: Limit, bounds: Bounds) -> str:
    if group.measured is not None:
        return _remark_on_measured(group, group.measured)
    if group.unpredicted:
        return group.unpredicted
    search = group.perhaps or group.surely
    if not search.fits and group.perhaps is not None:
        return (
            f"nothing fits: {bounds.granularity} takes {_peak_gib(group, bounds.granularity)} GiB"
        )
    if search.fails is None:
        return f"not tried above {search.fits}: --up-to goes on"
    return "compiled: predicted as eager, more may fit" if group.perhaps is None else ""


def _remark_on_measured(group: Limit, measured: Search) -> str:
    if group.failure:
        return group.failure
    if measured.next is not None:
        return "not done: run it again"
    if group.unpredicted:
        return f"{'' if measured.fits else 'nothing fits; '}measured alone: {group.unpredicted}"
    fails = group.perhaps.fails if group.perhaps is not None else None
    if measured.fits < group.surely.fits:
        return "less fits than was predicted"
    if fails is not None and measured.fits >= fails:
        return "more fits than was predicted"
    if measured.fails is None:
        return f"not tried above {measured.fits}: --up-to goes on"
    return "confirmed" if measured.fits else "nothing fits"
