"""The table of the fastest configurations that `sweep best` has found."""

from __future__ import annotations

from collections import Counter

from orchestrator.analysis.axes import axis_text, key_axes
from orchestrator.analysis.fastest import (
    StoredCandidate,
    StoredSearch,
    stored_searches,
    times_as_fast,
)
from orchestrator.analysis.results import Results
from orchestrator.report.tables import layouts
from orchestrator.report.tables.formatters import to_gib
from orchestrator.report.tables.table import (
    MISSING,
    Entry,
    Table,
    TableGrid,
    axis_entry,
    milliseconds,
    quantity,
)
from orchestrator.report.text.numbers import number, ratio
from orchestrator.store.manifest import BEST


def _best_rows(results: Results) -> TableGrid:
    """Return one row for each group of the last search that has an answer."""
    over = tuple(results.manifest.get(BEST, {}).get("over", ()))
    found = []
    for search in stored_searches(results):
        best = search.winner
        if best is not None and best.row is not None:
            found.append((best.row, _entries(search, best)))
    return layouts.grid_of(key_axes(results, without=over), found)


def _entries(search: StoredSearch, best: StoredCandidate) -> dict[str, Entry]:
    default, speed = search.entrants[search.default], best.speed
    assert speed is not None
    step = milliseconds(1e3 * speed.step_s)
    if speed.has_interval:
        step = step._replace(spread=f" [{number(1e3 * speed.low_s)}, {number(1e3 * speed.high_s)}]")
    faster = quantity(times_as_fast(best, default)[0], ".2f") if default.speed else MISSING
    confirmation = search.confirmation
    added = [
        f"{name}={axis_text(best.options[name])} instead of {axis_text(other.options[name])} "
        f"{ratio(times_as_fast(best, other)[0])}"
        for name, other in search.without_options(best)
    ]
    counts = Counter(
        one.reason or ("little to gain" if search.ended else "not yet")
        for one in search.entrants
        if not one.speed
    )
    unmeasured = [f"{count}: {reason}" for reason, count in counts.most_common()]
    return {
        **{name: axis_entry(value) for name, value in best.options.items()},
        "step ms": step,
        "× default": faster,
        "tokens/s": quantity(1 / best.pace_s, ",.0f") if best.tokens > 1 else MISSING,
        "peak GiB": to_gib(speed.peak_bytes),
        "measured": quantity(len(search.measured), "d"),
        "candidates": quantity(len(search.entrants), "d"),
        "rounds": quantity(confirmation.rounds if confirmation else None, "d"),
        "each option adds": Entry("; ".join(added)) if added else MISSING,
        "not measured": Entry("; ".join(unmeasured)) if unmeasured else MISSING,
    }


BEST_TABLE = Table(
    "best",
    "The fastest configurations",
    "The answers of the last `sweep best`, one for each group of cells that differ along the"
    " searched axes alone. The columns of the searched axes have the answer. The first attempt of a"
    " cell counts, with the 95 % interval of its median. Rounds: how often the best and the default"
    " were measured again; their ratio is then that of the rounds. Each option adds: times as fast as"
    " the measured candidate that differs in it alone.",
    _best_rows,
    is_default=True,
)
