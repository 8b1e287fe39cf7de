"""All findings of a run, the most useful first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
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

# Those without a gain stay in this order, behind the others.
RULES: Sequence[Rule] = (
    about_failures,
    about_repetitions,
    about_times,
    about_memory,
    about_precision,
    about_compiling,
    about_attention,
    about_options,
    about_other_axes,
    about_several_gpus,
    about_stragglers,
    about_collectives,
    about_hiding,
    about_sums,
    about_autocast,
    about_norms,
    about_warm_up,
    about_kernels,
    about_softmax,
    about_busy_time,
    about_backward,
    about_parts,
    about_predictions,
    about_endings,
    about_trust,
)


def findings(results: Results, rules: Iterable[Rule] = RULES) -> list[Finding]:
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
    found = [finding for rule in rules for finding in _found(rule, results)]
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


def _found(rule: Rule, results: Results) -> list[Finding]:
    try:
        return list(rule(results))
    except Exception as error:  # one finding that fails must not cost the report
        name = rule.__name__.removeprefix("about_").replace("_", " ")
        text = f"The finding on {name} cannot be made:"
        return [Finding("", name, NOTHING, "", text, f"{typed_error_text(error)}.")]
