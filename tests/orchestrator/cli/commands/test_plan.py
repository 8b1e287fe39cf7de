"""`sweep plan --format json`: what is planned for each cell, for programs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import Result

from orchestrator.cli.text.plan import plan_records
from orchestrator.hardware.gpu_catalog import find_gpu
from orchestrator.planning.cell_decisions import make_plan
from orchestrator.planning.invocation import RunOptions
from orchestrator.planning.predicting_process import PredictingProcess
from tasks.prediction.records import Prediction, PredictionRequest, unknown
from tasks.spec.registry import make_cell
from tasks.spec.tables import Sample

GIB = 1024**3
CONFIG = """
name: test
defaults: {device: cuda}
grids:
  - task: train_step
    fixed: {size: tiny}
    axes: {context_length: [8, 16], precision: [fp32, bf16]}
  - task: matmul
"""


@pytest.fixture(autouse=True)
def _predictions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Predict 2 GiB for each cell, of which weights take 1, without a process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def answer(child: object, request: PredictionRequest) -> Prediction:
        samples = [
            Sample("prediction", f"peak_{kind}_bytes", "bytes", gib * GIB, mode, "forward")
            for mode in ("first", "steady")
            for kind, gib in (("allocated", 2.0), ("reserved", 2.5))
        ]
        parameters = Sample("prediction", "at_peak_bytes", "bytes", GIB, note="parameters")
        verdicts = dict.fromkeys(request.caps_bytes, "fits")
        return Prediction("tracked", "", (*samples, parameters), verdicts)

    monkeypatch.setattr(PredictingProcess, "ask", answer)


def test_a_program_reads_the_plan_of_each_cell(
    sweep_here: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    plain = json.loads(sweep_here("plan", "c.yaml", "--format", "json").stdout)
    done = sweep_here("plan", "c.yaml", "--memory", "--gpu", "H200", "--format", "json")
    cells = json.loads(done.stdout)
    assert [{**cell, "memory": None} for cell in cells] == [
        {**cell, "memory": None} for cell in plain
    ]
    assert all("memory" not in cell for cell in plain)
    listed = sweep_here("plan", "c.yaml").stdout
    assert [cell["cell"] for cell in cells] == re.findall(r"^  run  (\w{12}) ", listed, re.M)
    params = [(cell["params"].get("context_length"), cell["params"]["precision"]) for cell in cells]
    assert params == [(8, "fp32"), (8, "bf16"), (16, "fp32"), (16, "bf16"), (None, "fp32")]
    for cell in cells:
        assert make_cell(cell["task"], cell["params"]).id == cell["cell"]
        keys = ("status", "action", "repetitions", "reason")
        assert [cell[key] for key in keys] == ["pending", "run", 1, "new"]
    assert cells[0]["memory"] == {
        "verdict": "fits",
        "limit_bytes": find_gpu("H200").usable_bytes,
        "peak_allocated_bytes": 2 * GIB,
        "peak_reserved_bytes": 2.5 * GIB,
        "at_least_bytes": None,
        "how": "tracked",
        "torch": version("torch"),
        "reason": "",
        "at_peak_bytes": {"parameters": GIB},
        "module_bytes": {},
    }
    assert cells[-1]["memory"]["verdict"] is None
    assert cells[-1]["memory"]["reason"] == "the memory of matmul is not predicted"


def test_a_plan_of_20_000_cells_takes_no_more_time_a_cell_than_one_of_2_500() -> None:
    cells = [make_cell("matmul", {"seed": seed}) for seed in range(20_000)]
    plan = make_plan(cells, {}, RunOptions(), 2)
    few = make_plan(cells[:2_500], {}, RunOptions(), 2)
    durations_s = []
    for one in (few, plan):
        started_s = time.process_time()
        records = list(map(json.dumps, plan_records(one, {}, None)))
        durations_s.append(time.process_time() - started_s)
        assert len(records) == len(one.decisions)
    assert durations_s[1] < 3 * 8 * durations_s[0]  # 8 if it is linear, and 64 if quadratic


@pytest.mark.parametrize(("precision", "is_noted"), [("bf16", True), ("bf16_pure", False)])
def test_the_plan_says_that_autocast_leaves_weights_in_fp32(
    precision: str, is_noted: bool, sweep_here: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    words = ("--set", f"precision={precision}", "--memory", "--gpu", "H200")
    lines = " ".join(sweep_here("plan", "c.yaml", *words).stdout.split())
    note = "weights stay in fp32: up to 1.00 GiB; precision=bf16_pure saves half of that"
    assert (note in lines) == is_noted


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_model_that_fails_in_all_cells_is_an_error_of_its_user(
    form: str, sweep_here: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    lengths = [8, 16]  # for which the model raises

    def answer(child: object, request: PredictionRequest) -> Prediction:
        is_broken = request.cell.params.values()["context_length"] in lengths
        return unknown("ValueError: no") if is_broken else Prediction("closed form", "no data")

    monkeypatch.setattr(PredictingProcess, "ask", answer)
    words = ("plan", "c.yaml", "--memory", "--gpu", "H200", "--format", form)
    done = sweep_here(*words)
    assert done.exit_code == 2
    assert done.stderr == "sweep: none of 4 cells could be predicted: ValueError: no\n"
    assert "verdict" not in done.stdout
    lengths.pop()
    assert sweep_here(*words).exit_code == 0
    assert sweep_here("plan", "c.yaml", "--format", form).exit_code == 0
