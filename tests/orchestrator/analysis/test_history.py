"""Kernel times over many runs: which run is suspect, and the command that decides."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result

from orchestrator.analysis.history import cell_histories, first_suspect
from orchestrator.store.run import Run
from tasks.spec.outcome import Outcome
from tests.orchestrator.analysis.test_comparison import gpu_cell, on, write

pytestmark = pytest.mark.usefixtures("derive_once")
MakeOutcome = Callable[..., Outcome]
Sweep = Callable[..., Result]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([10.0] * 10, None),  # too few
        ([10.0] * 11, None),
        ([10.0] * 8 + [10.15] * 3, None),
        ([10.0] * 8 + [10.3] * 3, 8),
        ([10.0] * 9 + [10.3] * 2, 9),  # known at the second run
        ([10.0] * 10 + [10.3], None),
        ([10.0] * 9 + [10.3] + [10.0] * 5, None),  # one slow run
        ([10.0] * 20 + [10.3] * 20, 20),
        ([10.0] * 10 + [9.0] * 10, None),
        ([10.0] * 10 + [10.3] * 10 + [11.0] * 5, 10),  # the first one
    ],
)
def test_three_runs_must_exceed_the_eight_before(times: list[float], expected: int | None) -> None:
    assert first_suspect(times) == expected


def test_noise_of_kernel_times_makes_no_commit_suspect() -> None:
    rng = np.random.default_rng(0)
    histories = np.exp(rng.normal(0, 0.004, (300, 60)))
    assert not [one for one in histories.tolist() if first_suspect(one) is not None]
    histories[:, 30:] *= 1.03
    found = [first_suspect(one) for one in histories.tolist()]
    assert None not in found
    assert np.mean([one == 30 for one in found]) > 0.9


@pytest.fixture
def runs(tmp_path: Path, make_outcome: MakeOutcome) -> list[Run]:
    """Eleven runs of two cells, each at a commit. From the tenth on, the second takes 4 % longer."""
    gpu = [make_outcome(device="cuda", batch_size=size) for size in (1, 2)]
    runs = []
    for number in range(11):
        outcomes = []
        for cell, ms in zip(gpu, (10.0, 20.8 if number > 8 else 20.0), strict=True):
            (one,) = gpu_cell(cell, (40.0,), (ms,))
            outcomes.append(replace(one, started_at=1e9 + 1e5 * number))
        runs.append(write(tmp_path / f"run{number}", *outcomes, commit=f"{number:012x}"))
    return runs


def test_runs_are_sorted_by_time(runs: list[Run]) -> None:
    first, second = cell_histories(runs[::-1])
    assert (first.suspect, second.suspect) == (None, 9)
    assert [point.ms for point in second.points] == pytest.approx([20.0] * 9 + [20.8] * 2)
    assert second.points[9].commit == f"{9:012x}"


def test_a_history_prints_the_command_that_decides(sweep_here: Sweep, runs: list[Run]) -> None:
    names = [str(run.folder) for run in runs]
    done = sweep_here("compare", *names, "--history")
    assert done.exit_code == 0, done.output
    assert "1 cell is suspect: the median of 3 runs is more than 2% above" in done.stdout
    lines = " ".join(done.stdout.split())
    assert re.search(
        rf"--a commit={8:012x} --b commit={9:012x} --where cell=[0-9a-f]{{12}} ", lines
    )
    assert "charts: sweep report " in lines
    assert "runs, oldest first: run0 2001-09-09 0000000, run1 2001-09-10 0000000, run2 " in lines
    head, first, last = sweep_here(
        "compare", *names, "--history", "--format", "csv"
    ).stdout.splitlines()
    columns = "last_first,first_suspect,first_ms,last_ms,first_run,last_run,runs,commits,status"
    assert head.endswith(columns)
    assert [line.split(",")[4:6] for line in (first, last)] == [
        ["1", ""],
        ["1.04", "run9 2001-09-19 0000000"],
    ]
    assert last.split(",")[8:10] == ["run0 2001-09-09 0000000", "run10 2001-09-20 0000000"]


def test_kernel_times_of_two_kinds_of_gpu_are_no_history(
    sweep_here: Sweep, tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    names = []
    for gpu in ("NVIDIA H100", "NVIDIA A100"):
        (one,) = gpu_cell(make_outcome(device="cuda"), (40.0,), (10.0,))
        names.append(str(write(tmp_path / gpu, on("one", one, gpu=gpu)).folder))
    done = sweep_here("compare", *names, "--history")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "the runs have several kinds of GPU: NVIDIA A100, NVIDIA H100" in done.stderr


def test_few_runs_are_shown_without_a_suspect(sweep_here: Sweep, runs: list[Run]) -> None:
    names = [str(run.folder) for run in runs[6:]]
    done = sweep_here("compare", *names, "--history")
    assert "0 cells are suspect" in done.stdout
    assert "2 cells have fewer runs than that needs: 11" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--history", "--gate"), "--gate: is for two runs, and a history gives no verdict"),
        (("--history", "--json", "x.json"), "--json: is for two runs"),
        ((), "is a third run. Name two, or add --history"),
    ],
)
def test_a_history_is_no_gate(
    words: tuple[str, ...], message: str, sweep_here: Sweep, runs: list[Run]
) -> None:
    done = sweep_here("compare", *(str(run.folder) for run in runs), *words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_runs_without_kernel_times_have_no_history(
    sweep_here: Sweep, tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    names = [str(write(tmp_path / name, make_outcome()).folder) for name in "ab"]
    done = sweep_here("compare", *names, "--history")
    assert done.exit_code == 2
    assert "no cell has kernel times in two runs" in done.stderr
