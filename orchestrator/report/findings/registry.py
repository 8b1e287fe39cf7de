"""All findings of a run, the most useful first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from orchestrator.analysis.axes import NOTHING
from orchestrator.analysis.results import Results
from orchestrator.report.findings.breakdown import (
    about_backward,
    about_busy_time,
    about_kernels,
    about_softmax,
)
from orchestrator.report.findings.comparisons import (
    about_attention,
    about_compiling,
    about_options,
    about_other_axes,
    about_precision,
    about_warm_up,
)
from orchestrator.report.findings.finding import Finding
from orchestrator.report.findings.memory import about_memory, about_parts, about_predictions
from orchestrator.report.findings.numerics import about_autocast, about_norms, about_sums
from orchestrator.report.findings.parallel import (
    about_collectives,
    about_hiding,
    about_several_gpus,
    about_stragglers,
)
from orchestrator.report.findings.trust import (
    about_endings,
    about_failures,
    about_repetitions,
    about_times,
    about_trust,
)
from orchestrator.report.text.cell_names import MODEL_ARGS
from tasks.spec.messages import typed_error_text

Rule = Callable[[Results], Iterator[Finding]]
_MOST_OF_SECTION = 2  # on a first screen, so that it answers several questions

# With the section of the page that they answer. Those without a gain stay in this order, behind
# the others.
RULES: Mapping[Rule, str] = {
    about_failures: "failures",
    about_repetitions: "trust",
    about_times: "time",
    about_memory: "memory",
    about_precision: "time",
    about_compiling: "compile",
    about_attention: "attention",
    about_options: "memory",
    about_other_axes: "time",
    about_several_gpus: "parallel",
    about_stragglers: "parallel",
    about_collectives: "parallel",
    about_hiding: "parallel",
    about_sums: "numerics",
    about_autocast: "numerics",
    about_norms: "numerics",
    about_warm_up: "trust",
    about_kernels: "where",
    about_softmax: "where",
    about_busy_time: "where",
    about_backward: "where",
    about_parts: "memory",
    about_predictions: "memory",
    about_endings: "failures",
    about_trust: "trust",
}


def findings(results: Results, rules: Mapping[Rule, str] = RULES) -> list[Finding]:
    """Return the findings, ordered by the share of time, memory or cells that could be recovered."""
    cells = results.cells
    if cells.empty:
        return []
    # The names of cells have the arguments of a model, but not those that all cells share.
    shared = [
        name for name in cells.filter(like=MODEL_ARGS) if cells[name].nunique(dropna=False) == 1
    ]
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
    chosen: list[Finding] = []
    others: list[Finding] = []
    for finding in found:
        counts[finding.section] += 1
        is_first = counts[finding.section] <= _MOST_OF_SECTION
        (chosen if is_first else others).append(finding)
    return [*chosen, *others][:most]
