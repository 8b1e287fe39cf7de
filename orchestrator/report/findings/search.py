"""The finding on the fastest configuration that `sweep best` has found."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.analysis.fastest import StoredSearch, stored_searches, times_as_fast
from orchestrator.analysis.results import Results
from orchestrator.common.text import counted
from orchestrator.report.findings.finding import Finding, least_gain
from orchestrator.report.text.cell_names import scope_of
from orchestrator.report.text.numbers import interval, ratio
from tasks.spec.messages import assignments


def about_search(results: Results) -> Iterator[Finding]:
    """Yield the answer of the last search; of several groups, the one that gains most."""
    answers = [one for search in stored_searches(results) if (one := _answer(search))]
    if answers:
        yield max(answers, key=lambda finding: finding.gain)


def _answer(search: StoredSearch) -> Finding | None:
    best, default = search.winner, search.entrants[search.default]
    if best is None or best.row is None:
        return None
    words, its_words = (" ".join(assignments(one.options)) for one in (best, default))
    gained, shown, gain = None, "", 0.0
    if best is default:
        conclusion = f"No measured candidate is surely faster than the default, {words}."
        gained = 1.0
    elif default.speed is None:
        conclusion = f"{words} is the fastest. The default has no measured step to compare with."
    else:
        gained, low, high = times_as_fast(best, default)
        shown, gain = interval(low, high), least_gain(low, high)
        conclusion = f"{words} is {ratio(gained)} as fast as the default, {its_words}."
    measured = f"{len(search.measured)} of {counted(len(search.entrants), 'candidate')} measured"
    rows = [best.row, *([default.row] if default.row and best is not default else [])]
    return Finding(
        "best over default",
        ratio(gained),
        shown,
        conclusion,
        f"{measured}." if search.ended else f"{measured}; the search has not ended.",
        scope_of(best.row),
        gain,
        [(str(row["cell"]),) for row in rows],
        best.row.get("device") == "cuda" and (best.is_cpu_bound or default.is_cpu_bound),
    )
