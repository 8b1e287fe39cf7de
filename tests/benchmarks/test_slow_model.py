"""The model with a slow-down: `sweep ab` finds it in a real run, and in no other cell."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from orchestrator.analysis.verdicts import Verdict
from orchestrator.common.errors import EXIT_FAILURES
from orchestrator.config.grid import expand
from orchestrator.config.schema import load_config
from orchestrator.config.selection import Selection
from tests.conftest import ROOT

BENCHMARKS = ROOT / "benchmarks"
TENTH = ROOT / "results" / "published" / "h200" / "tenth"
# The second cell has the same model without the slow-down.
CONFIG = """
name: tiny
defaults:
  {device: cpu, pass: forward, timing: adaptive, precision: fp32, context_length: 64, vocab_size: 1000}
instruments: [timing, memory, telemetry]
grids:
  - task: train_step
    fixed:
      model: "slow_model:SlowTransformer"
      model_args: {size: tiny, context_length: 64, vocab_size: 1000}
  - task: train_step
    fixed: {size: tiny}
"""
POLICY = "gate: {rounds: {first: 20, more: 0}, step: {cpu_bound: 10%}}\n"


@pytest.fixture
def slow_model(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("slow_model")


@pytest.mark.parametrize(("percent", "expected_ms"), [(0, 20), (5, 21), (200, 60)])
def test_a_share_of_the_forward_pass_is_added(
    percent: int, expected_ms: int, slow_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms = 0

    def tick() -> float:
        nonlocal now_ms
        now_ms += 1
        return now_ms / 1e3

    def forward(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
        nonlocal now_ms
        now_ms += 19
        return token_ids

    monkeypatch.setenv("SLOW", str(percent))
    monkeypatch.setattr(slow_model, "time", SimpleNamespace(perf_counter=tick))
    monkeypatch.setattr(slow_model.TransformerLM, "forward", forward)
    model = slow_model.SlowTransformer("tiny", 8, vocab_size=10)
    model(torch.zeros(1, 8, dtype=torch.long))
    assert now_ms == pytest.approx(expected_ms, abs=2)  # each look at the clock takes 1 ms


def test_the_config_has_the_cells_of_a_run_with_their_kernel_time(
    slow_model: Any, tmp_path: Path
) -> None:
    path = tmp_path / "slow.yaml"
    path.write_text(json.dumps(slow_model.slowed_config(str(TENTH))))
    config, source = load_config(path)
    cells = expand(config, source, Selection()).cells
    assert len(cells) == 36
    arguments = [cell.params.values()["model_args"] for cell in cells]
    assert all(0.1 < one["kernel_ms"] < 2000 for one in arguments)


def test_a_short_pause_is_not_shortened_by_the_time_of_its_launch(
    slow_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cycles_per_ms, launch_ms = 1.98e6, 0.05
    slept: list[int] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.pauses = 0

        def record(self) -> None:
            self.pauses = len(slept)

        def query(self) -> bool:
            return True

        def elapsed_time(self, end: Event) -> float:
            pauses = slept[self.pauses : end.pauses]
            return sum(cycles / cycles_per_ms + launch_ms for cycles in pauses)

    monkeypatch.setattr(slow_model, "_CUDA", SimpleNamespace(Event=Event, _sleep=slept.append))
    pause = slow_model._GpuPause()
    for _ in range(5):
        pause(0.02)
    assert slept[0] >= 5 * cycles_per_ms
    assert [cycles / cycles_per_ms for cycles in slept[1:]] == pytest.approx([0.02] * 4, rel=0.02)


@pytest.mark.gpu
def test_a_pause_of_the_gpu_takes_its_time(slow_model: Any) -> None:
    pause = slow_model._GpuPause()
    ones = torch.ones(4096, 4096, device="cuda")
    for _ in range(200):  # an idle GPU raises its clock during the first pause, which is timed
        ones @ ones
    for _ in range(20):
        pause(2.0)
        torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    pause(2.0)
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) == pytest.approx(2.0, rel=0.05)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(900)
def test_the_gate_finds_a_slow_down_that_is_injected(
    tmp_path: Path, sweep: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    (tmp_path / "gate.yaml").write_text(POLICY)
    words = (
        "ab", "tiny.yaml", "--a", "env=SLOW=0", "--b", "env=SLOW=30", "--policy", "gate.yaml",
        "--scheduler", "serial", "--json", "gate.json",
    )  # fmt: skip
    ended = sweep(*words, timeout=900, env={"PYTHONPATH": f"{ROOT}{os.pathsep}{BENCHMARKS}"})
    assert not ended.stderr
    checks = json.loads((tmp_path / "gate.json").read_text())["checks"]
    times = {one["settings"].get("model"): one for one in checks if one["gate"] == "operations"}
    slow = times.pop("slow_model:SlowTransformer")
    (same,) = times.values()
    # On a busy machine either cell may be undecided, for a reason that is stated.
    assert slow["verdict"] in (Verdict.SLOWER, Verdict.UNDECIDED), ended.stdout
    assert same["verdict"] in (Verdict.SAME, Verdict.UNDECIDED), ended.stdout
    if slow["verdict"] == Verdict.UNDECIDED:
        pytest.skip(f"this machine is too busy: {slow['reason']}")
    assert ended.returncode == EXIT_FAILURES
    # The interval is wide on a busy machine.
    low, high = slow["interval"]
    assert low < 1.6
    assert high > 1.15
    assert len(slow["rounds"]) == 20
