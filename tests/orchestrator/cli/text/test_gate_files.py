"""Markdown, JUnit and JSON of a comparison, and the lines that say what was not decided."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from orchestrator.analysis.checks import Check, Comparison
from orchestrator.analysis.gate_policy import Policy
from orchestrator.analysis.verdicts import Verdict
from orchestrator.cli.text.comparison import describe_comparison
from orchestrator.cli.text.gate_files import gate_json, gate_junit, gate_markdown
from orchestrator.report.formats.terminal import Screen


def check(size: str, gate: str, verdict: Verdict, **values: object) -> Check:
    settings = {"task": "train_step", "size": size}
    return Check(f"id-{size}", settings, gate, verdict, **values)  # type: ignore[arg-type]


@pytest.fixture
def comparison() -> Comparison:
    logs = (0.048, 0.049, 0.05)
    slower = check(
        "large", "step", Verdict.SLOWER, a=100.0, b=105.0, unit="ms", log_ratios=logs,
        interval=(1.041, 1.059), threshold=0.02, detectable=0.03,
    )  # fmt: skip
    return Comparison(
        (
            slower,
            check("large", "memory", Verdict.SAME, a=2.0**30, b=2.0**30, unit="bytes"),
            check("small", "kernels", Verdict.SAME, a=1.0, b=1.0, unit="ms", log_ratios=(0.0,)),
            check(
                "tiny", "step", Verdict.UNDECIDED, unit="ms", reason="measured <once>",
                remedy="--repeat 5", interval=(0.0, float("inf")),
            ),
        ),
        Policy(),
        {"torch": ("2.12", "2.13")},
    )  # fmt: skip


def test_junit_has_a_case_for_each_cell_and_quantity(comparison: Comparison) -> None:
    """The attributes are those of the schema of Jenkins and pytest."""
    suite = ElementTree.fromstring(gate_junit(comparison))
    assert suite.tag == "testsuite"
    counts = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "4", "failures": "1", "errors": "0", "skipped": "1"}
    assert {child.tag for child in suite} == {"testcase"}
    names = [(case.get("classname"), case.get("name")) for case in suite]
    assert len(set(names)) == 4
    assert names[0] == ("train_step.step", "train_step size=large")
    (failure,) = suite.iter("failure")
    assert failure.get("message") == "B is 1.050 times A; 1.041 to 1.059; limit 2.0%"
    (skipped,) = suite.iter("skipped")
    assert skipped.get("message") == "measured <once>"


def test_json_has_the_ratio_of_every_round_and_no_infinite_number(comparison: Comparison) -> None:
    document = json.loads(gate_json(comparison))
    assert (document["schema"], document["outcome"], document["exit_code"]) == (1, "FAIL", 1)
    assert (document["cells"], document["decided_cells"]) == (3, 2)
    first, *_, last = document["checks"]
    assert first["rounds"] == pytest.approx([1.0492, 1.0502, 1.0513], abs=1e-4)
    assert first["fails"] is True
    assert last["interval"] is None
    assert last["remedy"] == "--repeat 5"


def test_markdown_begins_with_the_result_and_shows_failures_before_all_cells(
    comparison: Comparison,
) -> None:
    text = gate_markdown(comparison, ())
    shown, _, folded = text.partition("<details>")
    assert shown.startswith("## FAIL: 1 of 3 cells are worse in B; 1 undecided\n\ntorch: 2.12")
    assert "SLOWER" in shown
    assert "small" not in shown
    assert "small" in folded
    assert text.endswith("</details>\n")


def test_markdown_repeats_no_table_of_which_all_rows_are_shown(comparison: Comparison) -> None:
    slower, *_ = comparison.checks
    text = gate_markdown(Comparison((slower,), Policy()), ())
    assert text.count("SLOWER |") == 1
    assert "<details>" not in text
    many = Comparison((slower,) * 21, Policy())
    assert gate_markdown(many, ()).count("<details>") == 1


def test_an_undecided_comparison_says_what_and_why() -> None:
    open_check = check(
        "tiny", "step", Verdict.UNDECIDED, unit="ms", reason="measured once", remedy="--repeat 5"
    )
    comparison = Comparison((open_check,), Policy(), {"torch": ("2.12", "2.13")})
    lines = list(describe_comparison(comparison, Screen()))
    assert "UNDECIDED: 1 of 1 cell was not decided, more than 10%" in lines
    assert lines[-1] == "undecided: 1 cell: measured once"  # test_golden_runs.py has the commands
    assert comparison.exit_code == 3
