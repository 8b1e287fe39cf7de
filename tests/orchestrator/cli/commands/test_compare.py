"""`sweep compare --gate`: exit codes, files, and predicted memory of two states of a user's model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from tasks.spec.outcome import Outcome
from tasks.spec.status import Status
from tests.orchestrator.analysis.test_comparison import gpu_cell, on, write
from tests.orchestrator.analysis.test_memory_gate import changed, record

Sweep = Callable[..., Result]

MODEL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 1024), nn.Linear(1024, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(100, 64), nn.Linear(64, 100)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Optimizer(torch.optim.SGD):
    pass
"""
CONFIG = """
name: mine
grids:
  - task: train_step
    fixed:
      {model: "mine:Model", vocab_size: 100, batch_size: 8, optimizer: "mine:Optimizer",
       optimizer_args: {lr: 0.1, momentum: 0.9}}
    axes: {context_length: [64, 128]}
"""


def predicted(sweep_here: Sweep, model: str, name: str) -> str:
    Path("mine.py").write_text(model)
    done = sweep_here("plan", "mine.yaml", "--memory", "--gpu", "H100", "--format", "json")
    assert done.exit_code == 0, done.output
    Path(name).write_text(done.stdout)
    return name


@pytest.mark.process
def test_the_memory_gate_names_what_a_change_of_the_model_saves(
    sweep_here: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    before = predicted(sweep_here, MODEL, "before.json")
    same = sweep_here("compare", before, predicted(sweep_here, MODEL, "same.json"), "--gate")
    assert same.exit_code == 0
    assert same.stdout.startswith("PASS: 2 of 2 cells\n")
    more = MODEL.replace("torch.relu(self.up(x))", "torch.relu(self.up(x)).exp()")
    worse = sweep_here("compare", before, predicted(sweep_here, more, "more.json"), "--gate")
    assert worse.exit_code == 1
    # One tensor of 8 × 128 × 1024 numbers in each of four blocks.
    assert "blocks.*: ExpBackward0 +16.0 MiB" in " ".join(worse.stdout.split())
    assert "FAIL: 2 of 2 cells are worse in B" in worse.stdout
    less = MODEL.replace("    pass", "    def __init__(self, params, lr, momentum):\n"
                         "        super().__init__(params, lr)")  # fmt: skip
    better = sweep_here("compare", before, predicted(sweep_here, less, "less.json"), "--gate")
    assert better.exit_code == 0
    assert better.stdout.count("BETTER") == 3
    assert "optimizer state -2.1 MiB" in " ".join(better.stdout.split())
    long = MODEL.replace("x = self.table", "assert tokens.shape[1] < 128\n        x = self.table")
    lost = sweep_here("compare", before, predicted(sweep_here, long, "lost.json"), "--gate")
    assert lost.exit_code == 1
    assert "FAIL: 1 of 2 cells are worse in B" in lost.stdout
    reason = (
        "predicted in A, not in B: activations unknown: it does not run without data: Assertion"
    )
    assert reason in " ".join(lost.stdout.split())


def predictions(tmp_path: Path, after: dict[str, Any]) -> tuple[Path, Path]:
    paths = tmp_path / "a.json", tmp_path / "b.json"
    for path, one in zip(paths, (record(), after), strict=True):
        path.write_text(json.dumps([one]))
    return paths


@pytest.mark.parametrize(("peak", "code"), [(0, 0), (96, 1)])
def test_the_gate_writes_its_files_and_the_summary_of_the_job(
    peak: float, code: int, sweep_here: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    files = predictions(tmp_path, changed(peak=peak, roles={"temporary": peak}, modules={}))
    outputs = ("--markdown", "m.md", "--junit", "j.xml", "--json", "g.json")
    assert sweep_here("compare", *files, "--gate", *outputs).exit_code == code
    assert Path("m.md").read_text().startswith("## FAIL" if code else "## PASS")
    assert json.loads(Path("g.json").read_text())["exit_code"] == code
    assert f'failures="{code}"' in Path("j.xml").read_text()
    assert summary.read_text() == "before\n" + Path("m.md").read_text()
    assert sweep_here("compare", *files).exit_code == 0  # without --gate, it only prints
    assert summary.read_text() == "before\n" + Path("m.md").read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "a.json: cannot be read"),
        ("{}", "a.json: has no predicted memory"),
        ('[{"cell": "1"}]', "a.json: has no predicted memory: 0.task: Field required"),
        (json.dumps([{**record(), "memory": None}]), "0.memory: Input should be an object"),
        (json.dumps([record(peak_allocated_bytes=math.nan)]), "should be a finite number"),
        (json.dumps([record(peak_allocated_bytes=-1)]), "should be greater than 0"),
        (json.dumps([record()])[:-20], "a.json: cannot be read: Invalid JSON"),
        ("[]", "the predictions have no cell in common"),
    ],
)
def test_a_file_that_is_no_prediction_is_refused(
    content: str, message: str, sweep_here: Sweep, tmp_path: Path
) -> None:
    files = predictions(tmp_path, record())
    files[0].write_text(content)
    done = sweep_here("compare", *files, "--gate")
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_pass_says_which_cells_are_missing(sweep_here: Sweep, tmp_path: Path) -> None:
    files = predictions(tmp_path, record())
    files[0].write_text(json.dumps([record(size) for size in ("small", *"1234")]))
    done = sweep_here("compare", *files, "--gate", "--markdown", "m.md", "--json", "g.json")
    assert done.exit_code == 0
    headline = "PASS: 1 of 1 cell; 4 cells of A are missing in B"
    assert headline in done.stdout.splitlines()
    named = " ".join(done.stdout.split())
    assert "not compared: 4 cells only in A: train_step size=1 context_length=128," in named
    assert named.endswith("size=3 context_length=128 and 1 more")
    assert Path("m.md").read_text().startswith(f"## {headline}")
    document = json.loads(Path("g.json").read_text())
    assert (document["only_in_a"], len(document["cells_only_in_a"])) == (4, 4)
    (tmp_path / "policy.yaml").write_text("gate: {status: {missing: fail}}")
    assert sweep_here("compare", *files, "--gate", "--policy", "policy.yaml").exit_code == 1


def test_a_missing_file_of_predictions_is_the_one_that_is_named(
    sweep_here: Sweep, tmp_path: Path
) -> None:
    files = predictions(tmp_path, record())
    for names in ((files[0], "typo.json"), ("typo.json", files[1])):
        done = sweep_here("compare", *names, "--gate")
        assert done.exit_code == 2
        assert "typo.json: cannot be read: No such file or directory" in done.stderr


def test_the_largest_change_is_of_those_that_are_known(sweep_here: Sweep, tmp_path: Path) -> None:
    less = changed(peak=-100, roles={"temporary": -100}, modules={})
    done = sweep_here("compare", *predictions(tmp_path, less), "--gate")
    assert "peak memory at most 1% more in 1 of 1 cell (largest change -10.0%)" in done.stdout
    other = record(limit_bytes=1.0)
    done = sweep_here("compare", *predictions(tmp_path, other), "--gate")
    assert "peak memory at most 1% more in 0 of 1 cell\n" in done.stdout


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("gate: {memory: 1}", "policy.yaml:1: gate.memory: is not a percentage"),
        ("gate:\n  memry: 1%", "policy.yaml:2: gate.memry: unknown name"),
        ("gate: {cells: [{when: {size: xl}, memory: 2%}]}", "size: xl}, which no cell matches"),
        ("gate: {cells: [{when: {siz: xl}, memory: 2%}]}", "size"),
        ("gate: [", "policy.yaml:1"),
    ],
)
def test_a_policy_that_is_wrong_is_refused_with_its_place(
    policy: str, message: str, sweep_here: Sweep, tmp_path: Path
) -> None:
    (tmp_path / "policy.yaml").write_text(policy)
    done = sweep_here(
        "compare", *predictions(tmp_path, record()), "--gate", "--policy", "policy.yaml"
    )
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_runs_of_two_kinds_of_gpu_are_no_evidence_about_a_change(
    sweep_here: Sweep, tmp_path: Path, make_outcome: Callable[..., Outcome]
) -> None:
    gpu = make_outcome(device="cuda")
    folders = []
    for kind in ("H100", "A100"):
        (cell,) = gpu_cell(gpu, (40.0,), (38.0,))
        folders.append(write(tmp_path / kind, on("one", cell, gpu=kind)).folder)
    done = sweep_here("compare", *folders, "--gate")
    assert done.exit_code == 2
    assert "A was measured on H100 and B on A100" in done.stderr
    assert sweep_here("compare", *folders).exit_code == 0


def test_two_cells_on_a_busy_cpu_are_undecided_and_say_what_to_do(
    sweep_here: Sweep, tmp_path: Path, make_outcome: Callable[..., Outcome]
) -> None:
    """They take 1.92 and 2.14 times as long, which is the CPU and not the program."""
    folders = []
    for name, factors in (("a", (1.0, 1.0)), ("b", (1.92, 2.14))):
        cells = [
            make_outcome(step_ms=(10 * factor,) * 3, number=number, batch_size=size)
            for size, factor in zip((1, 2), factors, strict=True)
            for number in (1, 2, 3)
        ]
        folders.append(write(tmp_path / name, *cells).folder)
    done = sweep_here("compare", *folders, "--gate")
    assert done.exit_code == 3
    lines = " ".join(done.stdout.split())
    assert "UNDECIDED: 2 of 2 cells were not decided" in lines
    assert "undecided: 2 cells: a step on the CPU takes longer when anything else runs" in lines
    assert lines.count("sweep run CONFIG --repeat 20 --out ") == 2
    assert "peak memory of 2 cells is not judged: it was not measured" in lines
    assert sweep_here("compare", *folders).exit_code == 0


def test_a_cell_that_runs_out_of_memory_in_both_is_counted(
    sweep_here: Sweep, tmp_path: Path, make_outcome: Callable[..., Outcome]
) -> None:
    ok, oom = make_outcome(), make_outcome(Status.OOM, batch_size=8)
    folder = write(tmp_path / "a", ok, oom).folder
    printed = " ".join(sweep_here("compare", folder, folder).stdout.split())
    assert "1 of 2 cells were not decided" in printed
    assert "status of 1 cell: oom → oom" in printed
    alone = write(tmp_path / "b", oom).folder
    done = sweep_here("compare", alone, alone)
    assert done.exit_code == 2
    assert "have 1 cell in common, and none was measured" in done.stderr


def test_models_of_two_sources_are_two_programs(
    sweep_here: Sweep, tmp_path: Path, make_outcome: Callable[..., Outcome]
) -> None:
    folders = []
    for name in ("a", "b"):
        cell = make_outcome(step_ms=(10.0,) * 7)
        cell = replace(cell, facts={**cell.facts, "model_source": f"source {name}"})
        folders.append(write(tmp_path / name, cell).folder)
    assert "same program" in sweep_here("compare", folders[0], folders[0]).stdout
    printed = sweep_here("compare", *folders).stdout
    assert "model_source (digest of the code of your own model): source a → source b" in printed
    assert "same program" not in printed
