"""Finding on a search: its answer against the default."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.analysis.results import Results
from orchestrator.report.findings.finding import Finding
from orchestrator.report.findings.registry import findings
from tests.orchestrator.report.tables.test_best_table import searched


def answer_of(results: Results) -> Finding:
    (found,) = [one for one in findings(results) if one.label == "best over default"]
    return found


def with_groups(results: Results, groups: Sequence[dict[str, Any]]) -> Results:
    best = {**results.manifest["best"], "groups": groups}
    return replace(results, manifest={**results.manifest, "best": best})


def test_the_answer_is_that_of_the_group_that_gains_most(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    results = searched(write_config, tmp_path / "out", {"fused": "does not fit"})
    found = answer_of(results)
    assert (found.marked_number, found.interval) == ("2.50×", "[2.50, 2.50]")
    assert found.gain > 0.59
    assert found.sentence == (
        "attention=sdpa optimizer=fused is 2.50× as fast as the default, attention=naive"
        " optimizer=course. 3 of 4 candidates measured."
    )
    assert found.scope.startswith("tiny")


def test_a_default_that_ran_out_of_memory_is_named(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    results = searched(write_config, tmp_path / "out", {})
    _, of_mini = results.manifest["best"]["groups"]
    found = answer_of(with_groups(results, [{**of_mini, "ended": ""}]))
    assert (found.number, found.interval, found.gain) == ("–", "", 0.0)
    assert found.sentence == (
        "attention=sdpa optimizer=fused is the fastest. The default has no measured step to compare"
        " with. 2 of 4 candidates measured; the search has not ended."
    )


def test_a_default_that_stays_the_best_gains_nothing(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    results = searched(write_config, tmp_path / "out", {})
    of_tiny, _ = results.manifest["best"]["groups"]
    fastest = list(of_tiny["candidates"])[-1]  # sdpa and fused
    found = answer_of(with_groups(results, [{**of_tiny, "default": fastest}]))
    assert (found.number, found.gain, found.basis) == ("1.00×", 0.0, [(fastest,)])
    assert found.conclusion == (
        "No measured candidate is surely faster than the default, attention=sdpa optimizer=fused."
    )


def test_rounds_of_a_confirmation_decide_the_number(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    found = answer_of(searched(write_config, tmp_path / "out", {}, repeat=4))
    assert found.number == "2.50×"
    assert found.interval


def test_a_run_without_a_search_has_no_answer(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    results = searched(write_config, tmp_path / "out", {})
    labels = [one.label for one in findings(with_groups(results, []))]
    assert "best over default" not in labels
