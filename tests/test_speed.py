"""What a user waits for, with ten thousand cells: in processor time and by the machine's pace, since these are promises about
work, not about load."""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from benchmarks.report import CONFIG as REPORTED
from benchmarks.report import ReportCost, make_run, report
from orchestrator.config.selection import Selection
from orchestrator.planning.request import SweepRequest, resolve
from orchestrator.store.open import open_for_writing
from orchestrator.store.parquet_parts import write_part
from orchestrator.store.run import Run
from orchestrator.store.run_writer import MERGE_BATCH
from orchestrator.store.tables import SCHEMAS
from tasks.harness.workload import run_step
from tasks.prediction import records
from tasks.prediction.predictor import NoData, Predictor
from tasks.process.phase_file import Progress
from tasks.spec.registry import make_cell
from tasks.train_step import build_on
from tests.conftest import sweep_command
from tests.support.pace import processor_s, takes_less_than
from tests.support.pages import cells_of_page

pytestmark = pytest.mark.speed

CONFIG = REPORTED.replace("cuda", "cpu").replace("SEEDS", ", ".join(map(str, range(28))))


def command_takes_less_than(limit_s: float, *words: object) -> bool:
    return takes_less_than(limit_s, lambda: processor_s(sweep_command(*words)))


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> SweepRequest:
    """A run of 10,080 cells, all finished, in as many parts as such a run leaves: merged ones and a rest of single ones."""
    folder = tmp_path_factory.mktemp("many")
    (folder / "many.yaml").write_text(CONFIG)
    request = resolve(folder / "many.yaml", Selection(), folder / "run")
    rows = [
        {
            "cell": cell.id, "attempt": 1, "task": "train_step", "params": json.dumps(cell.params.values()), "status": "ok",
            "evidence": "{}", "facts": json.dumps({"x": "y" * 1500}), "started_at": datetime.now(UTC), "wall_s": 10.0,
        }
        for cell in request.expansion.cells
    ]  # fmt: skip
    samples = [
        {
            "cell": cell.id, "attempt": 1, "instrument": "timing", "mode": "synced", "phase": phase, "metric": "duration",
            "unit": "ms", "step": step, "value": 10.0 + step,
        }
        for cell in request.expansion.cells
        for phase in ("forward", "backward", "optimizer", "step")
        for step in range(3)
    ]  # fmt: skip
    with open_for_writing(Run(folder / "run")) as writer:
        writer.write_manifest(request.manifest({}, request.new_invocation()))
        write_part(
            folder / "run" / "samples" / "merged-0.parquet",
            pa.Table.from_pylist(samples, SCHEMAS["samples"]),
        )
        singles = len(rows) % MERGE_BATCH
        for start in range(0, len(rows) - singles, MERGE_BATCH):
            name = f"merged-{start}.parquet"
            write_part(
                folder / "run" / "attempts" / name,
                pa.Table.from_pylist(rows[start : start + MERGE_BATCH], SCHEMAS["attempts"]),
            )
        for row in rows[-singles:]:
            name = f"{row['cell']}-1.parquet"
            write_part(
                folder / "run" / "attempts" / name, pa.Table.from_pylist([row], SCHEMAS["attempts"])
            )
    return request


def test_help_is_there_at_once() -> None:
    assert command_takes_less_than(0.3, "--help")


def test_a_plan_of_ten_thousand_cells(many: SweepRequest, tmp_path: Path) -> None:
    assert len(many.expansion.cells) == 10_080
    assert command_takes_less_than(2.6, "plan", many.config_path, "--out", tmp_path / "new")
    assert command_takes_less_than(2.6, "plan", many.config_path, "--out", many.run.folder)


def test_a_plan_of_ten_thousand_cells_half_of_them_finished(many: SweepRequest) -> None:
    """What is left is estimated from what is done: in time that grows with the cells, not with their square."""
    seeds = ",".join(str(seed) for seed in range(14))
    halves = ("--set", "batch_size=4,8", "--set", f"seed={seeds}")
    assert command_takes_less_than(3, "plan", many.config_path, "--out", many.run.folder, *halves)


def test_the_status_of_ten_thousand_finished_cells(many: SweepRequest) -> None:
    assert command_takes_less_than(2.6, "status", many.run.folder)


@pytest.mark.timeout(280)
def test_the_report_of_many_cells(tmp_path: Path) -> None:
    """Its page holds every cell, what a browser has to lay out at once is bounded, and so is what it takes to make it.

    A quarter of what benchmarks/report.py makes, in which cells have all their samples. Much of what it takes does not grow with
    them: imports, and the engine that draws.
    """
    request = make_run(tmp_path / "many", 2_500)
    cells = len(request.expansion.cells)
    taken: list[ReportCost] = []

    def processor_s_of_report() -> float:
        taken.append(report(tmp_path / "many"))
        return taken[-1].cpu_s

    assert takes_less_than(16, processor_s_of_report, tries=2)
    page = (tmp_path / "many" / "report" / "index.html").read_text()
    assert len(set(cells_of_page(page))) == cells == 2_520
    assert page.count("<tr>") < 3_000
    assert min(one.peak_mb for one in taken) < 430


def test_a_prediction_takes_no_longer_than_the_steps_that_it_follows() -> None:
    """On tensors without data, in processor time: both strike the same machine, and half as long is what it takes.

    `sweep plan configs/full.yaml --memory`, with an empty cache, shows what that comes to.
    """
    cells = [
        make_cell("train_step", {"size": "small", "pass": pass_})
        for pass_ in ("train_step", "forward_backward", "forward")
    ]
    followed, bare = [], []
    while not followed or (min(followed) >= min(bare) and len(followed) < 3):
        began = time.process_time()
        predictor = Predictor()
        assert all(
            predictor.predict(records.PredictionRequest(cell)).how == "tracked" for cell in cells
        )
        followed.append(time.process_time() - began)
        began = time.process_time()
        for cell in cells:
            workload = build_on(NoData(), cell.params)
            for _ in range(2):
                run_step(workload, Progress())
        bare.append(time.process_time() - began)
    assert min(followed) < min(bare)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
