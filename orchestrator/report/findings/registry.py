"""All findings of a run, the most useful first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from orchestrator.analysis.axes import NOTHING
from orchestrator.analysis.results import Results
from orchestrator.report.findings import (
    breakdown,
    comparisons,
    memory,
    numerics,
    parallel,
    search,
    trust,
)
from orchestrator.report.findings.finding import Finding
from orchestrator.report.text.cell_names import MODEL_ARGS
from tasks.spec.messages import typed_error_text

Rule = Callable[[Results], Iterator[Finding]]
_MOST_OF_SECTION = 2  # on a first screen, so that it answers several questions

# With the section of the page that they answer. Those without a gain stay in this order, behind
# the others.
RULES: Mapping[Rule, str] = {
    trust.about_failures: "failures",
    trust.about_repetitions: "trust",
    trust.about_times: "time",
    memory.about_memory: "memory",
    search.about_search: "time",
    comparisons.about_precision: "time",
    comparisons.about_compiling: "compile",
    comparisons.about_attention: "attention",
    comparisons.about_options: "memory",
    comparisons.about_other_axes: "time",
    parallel.about_several_gpus: "parallel",
    parallel.about_stragglers: "parallel",
    parallel.about_collectives: "parallel",
    parallel.about_hiding: "parallel",
    numerics.about_sums: "numerics",
    numerics.about_autocast: "numerics",
    numerics.about_norms: "numerics",
    comparisons.about_warm_up: "trust",
    breakdown.about_kernels: "where",
    breakdown.about_softmax: "where",
    breakdown.about_busy_time: "where",
    breakdown.about_backward: "where",
    memory.about_parts: "memory",
    memory.about_predictions: "memory",
    trust.about_endings: "failures",
    trust.about_trust: "trust",
}


def findings(results: Results, rules: Mapping[Rule, str] = RULES) -> list[Finding]:
    """Return the findings, ordered by the share of time, memory or cells that could be recovered."""
    cells = results.cells
    if cells.empty:
        return []
    # The names of cells have the arguments of a model, but not those that all cells share.
    counts = cells.filter(like=MODEL_ARGS).nunique(dropna=False)
    shared = list(counts.index[counts == 1])
    axes = tuple(axis for axis in results.axes if axis not in shared)
    results = replace(results, cells=cells.drop(columns=shared), axes=axes)
    found = []
    for rule, section in rules.items():
        try:
            own = list(rule(results))
        except Exception as error:  # one finding that fails must not cost the report
            name = rule.__name__.removeprefix("about_").replace("_", " ")
            text = f"The finding on {name} cannot be made:"
            own = [Finding(name, NOTHING, "", text, f"{typed_error_text(error)}.")]
        found += [replace(one, section=one.section or section) for one in own]
    return sorted(found, key=lambda finding: -finding.gain)


def first_screen(found: Sequence[Finding], most: int) -> list[Finding]:
    """Return the first findings, at most two of a section; others fill what is left."""
    counts: Counter[str] = Counter()
    first: list[Finding] = []
    others: list[Finding] = []
    for finding in found:
        counts[finding.section] += 1
        (first if counts[finding.section] <= _MOST_OF_SECTION else others).append(finding)
    return [*first, *others][:most]
