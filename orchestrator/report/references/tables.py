"""The table `reference`: published numbers of others next to those of the same cells in a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial
from itertools import count
from operator import attrgetter

from orchestrator.analysis.axes import NOTHING, Row, axis_texts, each, key_axes, sort_cells
from orchestrator.analysis.results import Results
from orchestrator.common.reference_devices import ALL, DEVICES
from orchestrator.report.references import counterparts, matching
from orchestrator.report.references.counterparts import COUNTERPARTS, DURATION
from orchestrator.report.references.records import ReferenceNumber, published_on, writeups
from orchestrator.report.tables import table
from orchestrator.report.tables.formatters import is_cpu_bound, missing
from orchestrator.report.tables.layouts import grid_of
from orchestrator.report.tables.table import MISSING, NOTES, Entry, Table, TableGrid
from tasks.spec.messages import shorten

Numbers = tuple[ReferenceNumber, ...]

NAME = "reference"
_PHASES = ("built", "forward", "backward", "communication", "optimizer", "step", "")
_identity = attrgetter(
    "writeup", "device", "task", "metric", "phase", "statistic", "variant", "amount"
)
_LONGEST = 160  # letters of a source on a screen: names of kernels run to 2,000


@cache
def reference_tables(device: str | None) -> tuple[Table, ...]:
    """Return the table of a device, or of all, as a tuple that is empty without a device.

    Raise KeyError for an unknown device.
    """
    if device is None:
        return ()
    where = "any device" if device == ALL else DEVICES[device]
    numbers = without_repetitions(published_on(device))
    names = set(map(attrgetter("writeup"), numbers))
    known = [one for one in writeups() if one["name"] in names]
    sources = [f"{one['name']}: {one['title']} ({one['source']})" for one in known]
    read = (
        "The ratio is ours / theirs: above 1.00, ours takes longer or needs more. "
        "Ours is the same statistic as theirs, mean ± standard deviation or median. "
        f"Write-ups: {'; '.join(sources)}."
    )
    return (Table(NAME, f"Published on {where}", read, partial(_rows, numbers)),)


def _rows(numbers: Numbers, results: Results) -> TableGrid:
    """Return one row for each published number and each cell of ours that it may belong to.

    The rows are in the order of our cells.
    """
    figures, pairs = counterparts.Figures(results), []
    for number, row in matching.matches(numbers, each(results.cells)):
        ours = COUNTERPARTS[number.metric].ours(number, row, figures)
        if ours is not None or row["status"] != "ok":
            pairs.append((number, row, ours))
    if not pairs:
        return TableGrid()
    ids = {row["cell"] for _, row, _ in pairs}
    cells = results.cells[results.cells["cell"].isin(ids)]
    axes = key_axes(replace(results, cells=cells))
    position = dict(zip(sort_cells(cells, axes)["cell"], count(), strict=False))
    pairs.sort(key=lambda pair: (position[pair[1]["cell"]], *_order(pair[0])))
    found = []
    numbers_of_notes, notes = table.note_entries(_notes(number, row) for number, row, _ in pairs)
    for (number, row, ours), own in zip(pairs, numbers_of_notes, strict=True):
        texts = zip(axes, axis_texts(row, axes), strict=True)
        words = [row["task"], *(f"{axis}={text}" for axis, text in texts if text != NOTHING)]
        names = {"cell": Entry(" ".join(words))}
        found.append((row, {**names, **_entries(number, row, ours), NOTES: own}))
    return grid_of([], found, ["cell", "quantity"])._replace(notes=notes)


def _order(number: ReferenceNumber) -> tuple[int, int, str]:
    return list(COUNTERPARTS).index(number.metric), _PHASES.index(number.phase), number.writeup


def _entries(number: ReferenceNumber, row: Row, ours: float | None) -> dict[str, Entry]:
    """Return the columns from the quantity to the source."""
    counterpart, theirs = COUNTERPARTS[number.metric], number.amount
    is_duration = number.metric == DURATION
    is_bound = is_cpu_bound(row) if is_duration else None
    has_sd = is_duration and number.statistic == "mean"
    our_sd = counterparts.phase_ms(row, number.phase, "sd") if has_sd else None
    ratio = MISSING
    if ours is not None and theirs and matching.states_shape(number):
        ratio = table.quantity(ours / theirs, ".2f")._replace(is_cpu_bound=is_bound)
    ours_entry = missing(row)
    if ours is not None:
        ours_entry = _with_sd(counterpart, ours, our_sd)._replace(is_cpu_bound=is_bound)
    theirs_entry = Entry("OOM", status="oom")
    if theirs is not None:
        theirs_entry = _with_sd(counterpart, theirs, number.sd)
    kernel = number.labels.get("kernel", "")
    source = ": ".join(filter(None, (number.writeup, number.title, number.variant, kernel)))
    processor = number.labels.get("device", "cuda")
    suffix = "" if processor == "cuda" else f", {processor}"
    source += f" ({DEVICES[number.device]}{suffix})"
    return {
        "quantity": Entry(counterpart.title_for(number)),
        "theirs": theirs_entry,
        "ours": ours_entry,
        "ratio": ratio,
        "source": Entry(shorten(source, _LONGEST), full=source),
    }


def _with_sd(counterpart: counterparts.Counterpart, value: float, sd: float | None) -> Entry:
    spread = "" if sd is None else f" ± {counterpart.show(sd)}"
    return Entry(counterpart.show(value), value / counterpart.unit, spread=spread, deviation=sd)


def _notes(number: ReferenceNumber, row: Row) -> list[str]:
    notes = [*number.notes, matching.unstated(number)]
    if matching.is_first_forward(number, row):
        notes.insert(0, "Ours is the forward pass of the first step, before there are gradients.")
    return list(filter(None, notes))


def without_repetitions(numbers: Iterable[ReferenceNumber]) -> Numbers:
    """Return the numbers with a counterpart, each once even if it is printed repeatedly."""
    first: dict[tuple[object, ...], ReferenceNumber] = {}
    for number in numbers:
        is_answered = number.metric in COUNTERPARTS and number.statistic not in ("sd", "rounded")
        if is_answered and not number.is_repeated:
            of_cell = (frozenset(number.axes.items()), frozenset(number.labels.items()))
            first.setdefault((_identity(number), *of_cell), number)
    return tuple(first.values())


def nothing_in_common(device: str) -> str:
    """Return what was published for a device, for a run that has no such cell."""
    numbers = published_on(device)
    covered = []
    for task in dict.fromkeys(map(attrgetter("task"), numbers)):
        words, own = [task], [number for number in numbers if number.task == task]
        for axis in ("size", "d_head", "context_length", "precision", "compile"):
            values = dict.fromkeys(str(value) for one in own for value in one.axes.get(axis, ()))
            words += [f"{axis}={','.join(values)}"] if values else []
        covered.append(" ".join(words))
    return (
        f"--reference {device}: none of its {len(numbers)} published numbers "
        f"belongs to a cell of this run. They cover {'; '.join(covered)}"
    )
