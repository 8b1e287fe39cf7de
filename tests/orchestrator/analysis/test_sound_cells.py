"""One abnormal cell costs itself alone: all other cells are derived and reported as without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.analysis.cells import derive_cells
from orchestrator.analysis.comparison import compare_runs
from orchestrator.analysis.results import load_results
from orchestrator.analysis.verdicts import Verdict
from orchestrator.report.findings.registry import findings
from orchestrator.report.tables.registry import TABLES, lay_out
from orchestrator.report.tables.table import Table
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from orchestrator.sweep.outcome_log import store_cells
from tasks.spec.attempt import Attempt, Settings
from tasks.spec.outcome import Outcome
from tasks.spec.registry import make_cell
from tasks.spec.status import Status
from tasks.spec.tables import Sample
from tests.conftest import FAST
from tests.support.tables import texts_of

# One worker makes what these tests share.
pytestmark = pytest.mark.xdist_group("sound cells")

MakeOutcome = Callable[..., Outcome]
ABNORMAL = st.sampled_from([0.0, -1.0, -5e-324, float("nan"), float("inf"), -float("inf"), 1e308])
ANY_JSON = st.sampled_from([None, True, 5, -1, 1.5, 10**400, "x", "", [], [1], {}, {"a": "b"}])
FACTS = [
    "tokens",
    "flops",
    "stage_s",
    "gpu",
    "host",
    "parameters",
    "compile_graphs",
    "torch",
    "env",
]
EVIDENCE = ["message", "reason", "asked_bytes", "exit_code", "witness", "snapshot"]


def measured_cell(context_length: int) -> Outcome:
    """Return a cell with samples of several instruments."""
    params = {**FAST, "context_length": context_length}
    times = [
        Sample("timing", "duration", "ms", 10.0 + step, mode, phase, step)
        for step in range(3)
        for mode in ("synced", "pipelined")
        for phase in ("forward", "backward", "optimizer", "step")
    ]
    others = [
        Sample("timing", "lead", "ms", 1.0, "pipelined", "step", 0),
        Sample("memory", "peak_allocated_bytes", "bytes", 2.0**30, "steady", "forward"),
        Sample("memory", "saved_operation_bytes", "bytes", 2.0**20, "steady", "forward", 1, "mm"),
        Sample("telemetry", "waited_for_core", "", 0.25, "timing"),
    ]
    facts = {"tokens": 16, "flops": {"forward": 10**9}, "stage_s": {"build": 1.0}, "host": "h"}
    attempt = Attempt(make_cell("train_step", params), 1, "/nowhere", Settings())
    samples = (*times, *others)
    return Outcome(attempt, Status.OK, "", "", {}, facts, samples, 1.7e9, 2.5)


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Attempts and samples of three cells, and the cells."""
    run = Run(tmp_path_factory.mktemp("sound") / "run")
    with open_for_writing(run) as writer:
        for length in (16, 32, 64):
            writer.append(measured_cell(length), None)
    attempts, samples = run.read("attempts"), run.read("samples")
    return attempts, samples, derive(attempts, samples)


def derive(attempts: pd.DataFrame, samples: pd.DataFrame) -> pd.DataFrame:
    return derive_cells(attempts, samples.astype({"cell": "category"})).set_index("cell")


def others(cells: pd.DataFrame, bad: str) -> pd.DataFrame:
    """Return the other cells, without columns that only the abnormal cell fills."""
    # A matrix product of the abnormal cell is no ceiling for others, and no ceiling at all.
    sound = cells.drop(index=bad).dropna(axis=1, how="all")
    return sound.astype(object).where(sound.notna(), None)


def assert_others_are_unchanged(before: pd.DataFrame, after: pd.DataFrame, bad: str) -> None:
    expected, found = others(before, bad), others(after, bad)
    ceilings = [name for name in expected if str(name).startswith("ceiling")]
    expected, found = (one.drop(columns=ceilings, errors="ignore") for one in (expected, found))
    pd.testing.assert_frame_equal(found[list(expected)], expected)
    assert set(found) == set(expected)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_abnormal_samples_of_a_cell_change_no_other_cell(frames: Any, data: st.DataObject) -> None:
    attempts, samples, before = frames
    bad = data.draw(st.sampled_from(sorted(samples["cell"].unique())))
    own = samples["cell"] == bad
    metrics = data.draw(st.sets(st.sampled_from(sorted(samples.loc[own, "metric"].unique()))))
    chosen = own & (samples["metric"].isin(metrics) if metrics else True)
    value = data.draw(ABNORMAL)
    changed = samples.assign(value=samples["value"].where(~chosen, value))
    if data.draw(st.booleans()):
        changed = changed.assign(step=changed["step"].where(~own))
    assert_others_are_unchanged(before, derive(attempts, changed), bad)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_facts_of_a_wrong_type_cost_their_cell_alone(frames: Any, data: st.DataObject) -> None:
    attempts, samples, before = frames
    bad = data.draw(st.sampled_from(sorted(attempts["cell"])))
    facts = data.draw(st.dictionaries(st.sampled_from(FACTS), ANY_JSON, min_size=1))
    evidence = data.draw(st.dictionaries(st.sampled_from(EVIDENCE), ANY_JSON))
    changed = attempts.copy()
    is_bad = changed["cell"] == bad
    for column, values in (("facts", facts), ("evidence", evidence)):
        (stored,) = changed.loc[is_bad, column]
        changed.loc[is_bad, column] = json.dumps({**json.loads(stored), **values})
    after = derive(changed, samples)
    shared = {"concurrent_attempts", "cpu_contended"}  # depend on the host of all attempts
    before, after = (one.drop(columns=shared, errors="ignore") for one in (before, after))
    assert_others_are_unchanged(before, after, bad)


@pytest.mark.parametrize(
    "step_ms",
    [
        float("nan"),
        1e308,
        *(pytest.param(ms, marks=pytest.mark.slow) for ms in (0.0, -1.0, float("inf"))),
    ],
)
def test_a_cell_with_abnormal_times_leaves_the_report_and_comparison_of_others(
    tmp_path: Path, make_outcome: MakeOutcome, step_ms: float
) -> None:
    run = Run(tmp_path / "run")
    with open_for_writing(run) as writer:
        writer.append(make_outcome(), None)
        bad = make_outcome(context_length=32, step_ms=(step_ms,) * 3)
        facts = {**bad.facts, "stage_s": [1], "flops": "many"}
        writer.append(replace(bad, facts=facts), None)
        writer.write_manifest({"name": "test"})
        store_cells(writer)
    results = load_results(run)
    good = results.cells[results.cells["context_length"] == 16]
    assert good["tokens_per_s"].tolist() == [16 / 11.0 * 1e3]
    pages = {page.table.name: page for page in lay_out(results)}
    assert "this table cannot be made" not in str([page.header for page in pages.values()])
    assert "11.00 ± 1.00" in str(texts_of(pages["timings"])[0])
    assert all("cannot be made" not in one.sentence for one in findings(results))
    verdicts = [one.verdict for one in compare_runs(run, run).times]
    assert verdicts == [Verdict.UNDECIDED] * 2


def test_a_table_that_fails_costs_itself_alone(
    tmp_path: Path, make_outcome: MakeOutcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_for_writing(Run(tmp_path / "run")) as writer:
        writer.append(make_outcome(), None)
    results = load_results(Run(tmp_path / "run"))
    names = [page.table.name for page in lay_out(results)]

    def fail(results: object) -> Any:
        raise ZeroDivisionError("float division by zero")

    failing = Table("failing", "A table", "", fail)
    first, *rest = lay_out(results, tables=(failing, *TABLES))
    assert texts_of(first) == [["ZeroDivisionError: float division by zero"]]
    assert [page.table.name for page in rest] == names
