"""Output of `sweep compare --history`: the kernel time of each cell over runs, and suspects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orchestrator.analysis.history import BEFORE, LAST, LIMIT, CellHistory, Point
from orchestrator.common.text import cells_and_verb, shell_command
from orchestrator.report.tables.layouts import text_table
from orchestrator.report.tables.table import (
    MISSING,
    Entry,
    RenderedTable,
    milliseconds,
    quantity,
)
from orchestrator.store.run import Run

_SUSPECT = "first suspect"


def history_table(histories: Sequence[CellHistory]) -> RenderedTable:
    """Return a row for each cell."""
    rows = []
    for one in histories:
        suspect, first, last = one.suspect, one.points[0], one.points[-1]
        measures = {
            "last / first": quantity(last.ms / first.ms, ".4f"),
            _SUSPECT: MISSING if suspect is None else Entry(_run(one.points[suspect])),
            "first": milliseconds(first.ms),
            "last": milliseconds(last.ms),
            "first run": Entry(_run(first)),
            "last run": Entry(_run(last)),
            "runs": quantity(len(one.points), ".0f"),
            "commits": quantity(len({point.commit for point in one.points}), ".0f"),
        }
        rows.append((one.settings, measures))
    return text_table("Kernel time", rows, _SUSPECT)


def _run(point: Point) -> str:
    """Return the name of a run, the day when it measured the cell, and its commit."""
    words = (point.run.folder.name, point.started_at[:10], point.commit[:7])
    return " ".join(filter(None, words))


def describe_suspects(histories: Sequence[CellHistory], runs: Sequence[Run]) -> Iterator[str]:
    """Yield the runs, the number of suspect cells, and the commands that decide and draw charts."""
    points = {point.run: point for one in histories for point in one.points}
    in_order = sorted(points.values(), key=lambda point: point.started_at)
    yield f"runs, oldest first: {', '.join(map(_run, in_order))}"
    suspects = [one for one in histories if one.suspect is not None]
    rule = f"the median of {LAST} runs is more than {LIMIT:.0%} above that of the {BEFORE} before"
    yield f"{cells_and_verb(len(suspects), 'is', 'are')} suspect: {rule}"
    short = sum(len(one.points) < BEFORE + LAST for one in histories)
    if short:
        yield f"{cells_and_verb(short, 'has', 'have')} fewer runs than that needs: {BEFORE + LAST}"
    pairs: dict[tuple[str, str], list[CellHistory]] = {}
    for one in suspects:
        pairs.setdefault(_commits(one), []).append(one)
    if suspects:
        yield "to decide:"
    for (good, bad), cells in pairs.items():
        newest = cells[0].points[-1].run.read_manifest().get("config_path", "CONFIG")
        sides = ("--a", f"commit={good or 'GOOD'}", "--b", f"commit={bad or 'BAD'}")
        where = "cell=" + "|".join(one.cell for one in cells)
        yield f"  {shell_command(['sweep', 'ab', str(newest), *sides, '--where', where])}"
    yield f"charts: {shell_command(['sweep', 'report', *map(str, runs)])}"


def _commits(one: CellHistory) -> tuple[str, str]:
    """Return the commits before and at the suspect; empty if they do not name two states."""
    assert one.suspect is not None
    good, bad = (one.points[number].commit for number in (one.suspect - 1, one.suspect))
    is_named = good and bad and good != bad and not (good + bad).count("+")
    return (good, bad) if is_named else ("", "")
