"""The table that `sweep max-context` and `sweep max-batch` print."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from orchestrator.config.grid import Expansion
from orchestrator.hardware.gpu_catalog import UNTESTED_ON_AMD
from orchestrator.planning.prediction_requests import cap_bytes
from orchestrator.planning.request import SweepRequest
from orchestrator.report.formats.terminal import Screen, dense_table_text
from orchestrator.report.tables.formatters import to_gib
from orchestrator.report.tables.layouts import text_table
from orchestrator.report.tables.table import (
    MISSING,
    NOTES,
    Entry,
    RenderedTable,
    at_least,
    quantity,
)
from orchestrator.sweep.capacity_limits import Bounds, Found, Limit, Search
from tasks.prediction.records import MARGIN, MAY_TAKE_MORE
from tasks.spec.cell import Cell


def describe_limits(
    request: SweepRequest, found: Found, bounds: Bounds, screen: Screen
) -> Iterator[str]:
    """Yield a table with a row per group, which fits the screen, and lines about all rows."""
    table = limits_table(request, found, bounds)
    yield dense_table_text(table, screen, "choose fewer cells with --where")
    # The batch size of a search for a context, or the reverse; labels have it if it varies.
    other = {"context_length": "batch_size", "batch_size": "context_length"}[bounds.axis]
    values = {cell.params.values().get(other) for cell in _smallest_cells(found, bounds)}
    if len(values) == 1 and None not in values:
        yield f"all cells: {other}={values.pop()}"
    if found.gpu is not None and found.gpu.is_amd:
        yield UNTESTED_ON_AMD
    unmeasured = [group for group in found.groups if group.measured is None]
    between = [
        fails - group.surely.fits
        for group in unmeasured
        if (fails := _predicted_oom(group)) is not None
    ]
    if max(between, default=0) > bounds.granularity:
        undecided = f"predicted within {100 * MARGIN:g} % of the limit, undecided"
        yield (
            f"between `fits up to` and `OOM from`: {undecided};"
            f" to measure it on the GPU itself: sweep best --largest {bounds.axis}"
        )


def limits_table(request: SweepRequest, found: Found, bounds: Bounds) -> RenderedTable:
    """Return a table with a row per group: the predicted and the measured limit, and a note."""
    cells = Expansion(_smallest_cells(found, bounds))
    is_measured = any(group.measured for group in found.groups)
    measured_bytes = _measured_bytes(request) if is_measured else {}
    rows = []
    for group, cell in zip(found.groups, cells.cells, strict=True):
        measures = _measures(group, cap_bytes(cell, found.gpu), bounds, measured_bytes)
        rows.append(({"task": cell.task, **cells.label.values(cell)}, measures))
    return text_table("Limits", rows)


def _smallest_cells(found: Found, bounds: Bounds) -> tuple[Cell, ...]:
    return tuple(group.at(bounds.granularity) for group in found.groups)


def _predicted_oom(group: Limit) -> int | None:
    """Return the smallest value that is predicted to run out of memory."""
    # Of a compiled cell that is predicted as eager, a larger one may fit.
    return group.perhaps.fails if group.perhaps is not None else None


def _measures(
    group: Limit, cap: int | None, bounds: Bounds, measured_bytes: Mapping[str, float]
) -> dict[str, Entry]:
    """Return the entries of a row; on a narrow screen, the last ones are left out."""
    fits, fails = group.surely.fits, _predicted_oom(group)
    up_to, oom_at, peak = None, None, None
    if group.measured is not None:
        up_to, oom_at = group.measured.fits or None, group.measured.fails
        peak = measured_bytes.get(group.at(up_to).id) if up_to else None
    return {
        f"{bounds.axis} fits up to": quantity(fits or None, "d"),
        "measured up to": quantity(up_to, "d"),
        "OOM at": quantity(oom_at, "d"),
        "measured": to_gib(peak),
        NOTES: Entry(_note(group, bounds)),
        "peak": _peak(group, fits),
        "OOM from": quantity(fails, "d"),
        "reserved": _reserved(group, fits, cap),
        "limit": to_gib(cap if group.predictions else None),
        "reserved at OOM": _peak(group, fails, "peak_reserved_bytes"),  # the memory that decides
    }


def _reserved(group: Limit, value: int | None, cap: int | None) -> Entry:
    unlimited = _peak(group, value, "peak_reserved_bytes")
    prediction = group.predictions.get(value or 0)
    if cap is None or prediction is None:
        return unlimited
    # At the limit of the device, the allocator returns cached blocks and tries again.
    if (prediction.peak_bytes("peak_reserved_bytes") or 0) > cap:
        return to_gib(cap)._replace(spread=f" ({unlimited} with room)")
    return unlimited


def _peak(group: Limit, value: int | None, metric: str = "peak_allocated_bytes") -> Entry:
    prediction = group.predictions.get(value or 0)
    if prediction is None:
        return MISSING
    if peak := prediction.peak_bytes(metric):
        return to_gib(peak)
    return at_least(to_gib(prediction.least_bytes()))


def _measured_bytes(request: SweepRequest) -> dict[str, float]:
    """Return the measured peak of each cell: of the allocator, or of the process on the CPU."""
    from orchestrator.analysis.results import load_results

    if not request.run.exists:
        return {}
    cells = load_results(request.run).cells.set_index("cell")
    # A GPU cell may have the peak of its process too.
    peaks = cells.reindex(columns=["peak_allocated_bytes", "peak_rss_bytes"]).astype("Float64")
    measured = peaks.bfill(axis=1)["peak_allocated_bytes"].dropna()
    return {str(cell): float(peak) for cell, peak in measured.items()}


def _note(group: Limit, bounds: Bounds) -> str:
    if group.measured is not None:
        return _note_on_measured(group, group.measured)
    if group.unpredicted:
        return group.unpredicted
    search = group.perhaps or group.surely
    if not search.fits and group.perhaps is not None:
        smallest = bounds.granularity
        return f"nothing fits: {smallest} takes {_peak(group, smallest)} GiB"
    if search.fails is None:
        return f"not tried above {search.fits}: increase --up-to"
    if group.perhaps is None:
        if any(one.how == MAY_TAKE_MORE for one in group.predictions.values()):
            return "compiled: predicted as eager, less may fit"
        return "compiled: predicted as eager, more may fit"
    return ""


def _note_on_measured(group: Limit, measured: Search) -> str:
    if group.failure:
        return group.failure
    if measured.next is not None:
        return "not finished: run it again"
    if group.unpredicted and not group.surely.fits:
        note = f"measured only: {group.unpredicted}"
        return note if measured.fits else f"nothing fits; {note}"
    if measured.fits < group.surely.fits:
        return "less fits than was predicted"
    fails = _predicted_oom(group)
    if fails is not None and measured.fits >= fails:
        return "more fits than was predicted"
    if measured.fails is None:
        return f"not tried above {measured.fits}: increase --up-to"
    return "confirmed" if measured.fits else "nothing fits"
