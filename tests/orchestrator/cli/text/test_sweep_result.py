"""What a sweep prints at its end, and its exit code, for each way to end."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.commands.run import end_with
from orchestrator.cli.text.sweep_result import conclude
from orchestrator.common.errors import NoGpuLeft
from orchestrator.planning.attempt_queue import QueueState
from orchestrator.planning.preflight import Exclusion
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from orchestrator.sweep.interruption import StopReason
from orchestrator.sweep.outcome_log import SweepResult
from tasks.spec.outcome import Outcome
from tasks.spec.registry import make_cell
from tasks.spec.status import Status

TABLES = "tables: sweep report out"
CELL = make_cell("train_step", {"device": "cpu", "size": "tiny"})
TWO_OK = {"counts": {Status.OK: 2}, "measured": frozenset("ab")}


def ended(**fields: Any) -> SweepResult:
    return SweepResult(folder="out", before={"pending": 3}, **fields)


CASES: dict[str, tuple[SweepResult, list[str], int]] = {
    "all measured": (ended(**TWO_OK), ["measured 2 cells: 2 ok; results in out", TABLES], 0),
    "repetitions": (
        ended(counts={Status.OK: 6, Status.OOM: 1}, measured=frozenset("abc")),
        ["measured 3 cells, 7 times in all: 6 ok, 1 oom; results in out", TABLES],
        0,
    ),
    "nothing to do": (
        SweepResult(folder="out", before={"ok": 3, "oom": 1}),
        ["nothing to measure: of 4 cells 3 ok, 1 oom; results in out", TABLES],
        0,
    ),
    "inferred": (
        ended(
            counts={Status.OK: 1, Status.OOM: 1, Status.OOM_INFERRED: 2},
            measured=frozenset("ab"),
            queue=QueueState(inferred=2),
        ),
        [
            "measured 2 cells: 1 ok, 1 oom; inferred that 2 more run out of memory; results in out",
            TABLES,
        ],
        0,
    ),
    "a cell failed": (
        ended(counts={Status.OK: 1, Status.CRASHED: 1}, measured=frozenset("ab")),
        [
            "measured 2 cells: 1 ok, 1 crashed; results in out",
            TABLES,
            "what failed: sweep status out",
        ],
        1,
    ),
    "a cell failed too often before": (
        SweepResult(folder="out", before={"ok": 4}, given_up={"failed": 1}),
        [
            "nothing to measure: of 4 cells 4 ok; results in out",
            TABLES,
            "skipped 1 cell, which failed too often before. To try again: sweep run c.yaml --retry failed",
            "what failed: sweep status out",
        ],
        1,
    ),
    "recovered": (
        ended(**TWO_OK, recovered=1),
        [
            "recovered 1 cell, measured by an earlier run that was killed",
            "measured 2 cells: 2 ok; results in out",
            TABLES,
        ],
        0,
    ),
    "predicted out of memory": (
        ended(**TWO_OK, excluded=(Exclusion(CELL, False), Exclusion(CELL, True))),
        [
            "skipped 1 cell, predicted to run out of memory",
            "measured 2 cells: 2 ok; results in out",
            TABLES,
        ],
        0,
    ),
    "interrupted": (
        ended(**TWO_OK, queue=QueueState(remaining=1), stop_reason=StopReason.SIGINT),
        [
            "measured 2 cells: 2 ok; results in out",
            "stopped by SIGINT with 1 cell left. To continue: sweep run c.yaml",
        ],
        130,
    ),
    "the time limit ended a cell": (
        ended(**TWO_OK, queue=QueueState(remaining=1), stop_reason=StopReason.TIME_LIMIT),
        [
            "measured 2 cells: 2 ok; results in out",
            "out of time with 1 cell left. To continue: sweep run c.yaml",
        ],
        75,
    ),
    "the time limit left no time for a cell": (
        ended(**TWO_OK, queue=QueueState(3, skipped_for_time=3, shortest_skipped_s=90.0)),
        [
            "measured 2 cells: 2 ok; results in out",
            "out of time with 3 cells left; the shortest is expected to take 1 min 30 s."
            " To continue: sweep run c.yaml",
        ],
        75,
    ),
    "nothing was measured in time": (
        ended(queue=QueueState(remaining=3), stop_reason=StopReason.TIME_LIMIT),
        [
            "measured nothing new; results in out",
            "out of time with 3 cells left. To continue: sweep run c.yaml",
            "nothing was measured within the time limit: if the next start takes as long,"
            " only a longer limit helps",
        ],
        75,
    ),
    "no GPU left": (
        ended(**TWO_OK, queue=QueueState(remaining=1), error=NoGpuLeft("no GPU is left")),
        [
            "measured 2 cells: 2 ok; results in out",
            "stopped with 1 cell left. To continue: sweep run c.yaml",
        ],
        2,
    ),
}


@pytest.mark.parametrize(("result", "lines", "code"), CASES.values(), ids=CASES.keys())
def test_each_end_has_its_lines_and_exit_code(
    result: SweepResult, lines: list[str], code: int
) -> None:
    assert conclude(result, "sweep run c.yaml", "sweep run c.yaml") == (lines, code)


def test_doubtful_cells_are_counted_with_a_remedy() -> None:
    quality = {"cpu-contended": 1, "interval-wide": 0, "concurrent": 2}
    command, again = "sweep run c.yaml --retry ok", "sweep run c.yaml"
    lines, code = conclude(ended(**TWO_OK, quality=quality), command, again)
    assert code == 0
    assert lines[1].startswith("1 cell timed while another program used the cores")
    assert lines[1].endswith("measure again: sweep run c.yaml --retry cpu-contended")
    assert lines[2].startswith("2 cells CPU-bound while other cells used the same host")
    assert lines[3:] == [TABLES]


def test_a_remedy_omits_the_retry_and_fresh_options_of_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sweep", "run", "c.yaml", "--retry", "ok", "--fresh"])
    with pytest.raises(SystemExit):
        end_with(ended(**TWO_OK, quality={"interval-wide": 1}))
    assert "again: sweep run c.yaml --retry interval-wide\n" in capsys.readouterr().out


def test_a_folder_with_a_blank_can_be_copied_into_a_shell() -> None:
    lines, _ = conclude(SweepResult(folder="a b"), "", "")
    assert lines[-1] == "tables: sweep report 'a b'"


def test_a_sweep_ends_with_the_models_that_ran_out_of_memory(
    tmp_path: Path, make_outcome: Callable[..., Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    with open_for_writing(Run(tmp_path)) as writer:
        writer.append(make_outcome(Status.OOM, context_length=64), None)
    counts: dict[Status, int] = {Status.OOM: 1}
    with pytest.raises(SystemExit):
        end_with(
            SweepResult(folder=str(tmp_path), before={}, counts=counts, measured=frozenset("a"))
        )
    assert re.search(r"^  tiny +1 of 1 +1 backward +64$", capsys.readouterr().out, re.MULTILINE)
