"""The result of a comparison as files for CI: Markdown, JUnit and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from xml.etree import ElementTree

from orchestrator.analysis.checks import Check, Comparison
from orchestrator.analysis.verdicts import Verdict
from orchestrator.cli.text.comparison import (
    changes_table,
    comparison_table,
    describe_differences,
    describe_outcome,
)
from orchestrator.report.formats.files import to_markdown
from orchestrator.report.tables.table import RenderedTable
from orchestrator.report.tables.views import view_of
from orchestrator.store.run import Run

_SCHEMA = 1  # raise it when a field changes its meaning
_SHOWN = 20  # rows of failures


def gate_markdown(comparison: Comparison, runs: Sequence[Run]) -> str:
    """Return a heading with the result and the rows that fail, and all rows folded if others exist."""
    headline, *lines = describe_outcome(comparison, runs)
    parts = [f"## {headline}", *describe_differences(comparison)]
    tables = [comparison_table(comparison), changes_table(comparison)]
    changed = [check for check in comparison.exact if check.verdict is not Verdict.SAME]
    others = False
    for table, checks in zip(tables, (comparison.times, changed), strict=True):
        fails = [check.fails or check.verdict is Verdict.UNDECIDED for check in checks]
        if table and any(fails):
            grid = table.grid.with_rows(fails)
            parts.append(_markdown(RenderedTable(table.table, grid, ""), _SHOWN))
        others = others or sum(fails) < len(checks) or len(checks) > _SHOWN
    parts.append("\n".join(f"- {line.strip()}" for line in lines))
    if others:
        shown = "\n\n".join(_markdown(table, None) for table in filter(None, tables))
        count = len(comparison.cells)
        parts.append(f"<details><summary>all {count} cells</summary>\n\n{shown}\n\n</details>")
    return "\n\n".join(parts) + "\n"


def _markdown(table: RenderedTable, max_rows: int | None) -> str:
    return to_markdown(view_of(table, max_rows=max_rows, max_columns=None)).strip()


def gate_junit(comparison: Comparison, name: str = "sweep compare") -> str:
    """Return one test case for each cell and quantity. name: of the suite."""
    failures, skipped = comparison.failures, comparison.undecided
    suite = ElementTree.Element(
        "testsuite",
        name=name,
        tests=str(len(comparison.checks)),
        failures=str(len(failures)),
        errors="0",
        skipped=str(len(skipped)),
    )
    for check in comparison.checks:
        gate = f"{check.settings.get('task', '')}.{check.gate}".lstrip(".")
        case = ElementTree.SubElement(suite, "testcase", classname=gate, name=check.label)
        if check.fails:
            ElementTree.SubElement(case, "failure", message=_message(check))
        elif check.verdict is Verdict.UNDECIDED:
            ElementTree.SubElement(case, "skipped", message=_message(check))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _message(check: Check) -> str:
    parts = [check.reason]
    if check.fails and check.ratio:
        parts.insert(0, f"B is {check.ratio:.3f} times A")
        if check.interval:
            parts.append(f"{check.interval[0]:.3f} to {check.interval[1]:.3f}")
        if check.threshold is not None:
            parts.append(f"limit {check.threshold:.1%}")
    return "; ".join(filter(None, parts))


def gate_json(comparison: Comparison) -> str:
    """Return all checks with the ratio of every round."""
    document = {
        "schema": _SCHEMA,
        "outcome": comparison.outcome,
        "exit_code": comparison.exit_code,
        "false_alarm": comparison.policy.false_alarm,
        "cells": len(comparison.cells),
        "decided_cells": comparison.decided_cells,
        "only_in_a": len(comparison.only[0]),
        "only_in_b": len(comparison.only[1]),
        "cells_only_in_a": comparison.only[0],
        "cells_only_in_b": comparison.only[1],
        "differences": dict(comparison.differences),
        "checks": list(map(_record, comparison.checks)),
    }
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _record(check: Check) -> dict[str, object]:
    record = asdict(check)
    record["rounds"] = [math.exp(one) for one in record.pop("log_ratios")]
    record["ratio"] = check.ratio
    record["fails"] = check.fails
    ends = record["interval"] or ()
    record["interval"] = list(ends) if all(map(math.isfinite, ends)) and ends else None
    if check.detectable is not None and math.isinf(check.detectable):  # the noise is not known
        record["detectable"] = None
    return record
