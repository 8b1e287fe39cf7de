"""Every sweep in configs/, made small, runs to its end on a machine without a GPU, and its tables come out."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from click.testing import Result

from orchestrator.analysis.cpu_bound import BoundBy, bound_by
from orchestrator.analysis.results import load_results
from orchestrator.config.grid import expand
from orchestrator.config.schema import load_config
from orchestrator.config.selection import Selection, parse_selection
from orchestrator.hardware.gpu_catalog import find_gpu
from orchestrator.planning.request import resolve
from orchestrator.report.tables.registry import TABLES
from orchestrator.store.run import Run
from tasks.prediction.predictor import Predictor
from tasks.prediction.records import PredictionRequest
from tests.conftest import ROOT

STEPS = ["device=cpu", "warmup_steps=1", "measured_steps=2"]
TRAINING = [*STEPS, "size=tiny", "context_length=8", "batch_size=1"]

# config → what makes it small (--set), what picks of it (--where), how its cells end, and the tables it is made for
SMALL: dict[str, tuple[list[str], list[str], dict[str, int], set[str]]] = {
    "attention": (
        [*STEPS, "batch_size=2", "d_head=8", "context_length=16,32", "compile=eager", "attention=naive,flash,cudnn"],
        ["causal=true", "precision=fp32"],
        {"ok": 4, "skipped": 2},
        {"attention", "scaling", "failures"},
    ),
    "attention compiled": (
        [*STEPS, "batch_size=2", "d_head=8", "context_length=16", "compile=eager,model", "attention=naive"],
        ["causal=true", "precision=fp32", "projections=false"],
        {"ok": 2},
        {"attention", "compile"},
    ),
    "attention-long": (
        [*STEPS, "d_head=8", "context_length=16", "precision=bf16_pure"], [], {"ok": 2}, {"attention"},
    ),
    "compile": (
        [*TRAINING, "vocab_size=200", "pass=forward", "compile=eager,blocks"],
        ["precision=fp32", "compile_mode=default"],
        {"ok": 2},
        {"compile", "utilisation"},
    ),
    "kernels": (
        [*STEPS, "size=tiny", "context_length=64", "batch_size=4", "precision=fp32", "compile=eager", "attention=naive,flash"],
        [],  # long enough that an operator which waits for a core for a millisecond is no twentieth of a step
        {"ok": 4},
        {"kernels", "coverage", "kernel-classes", "kernel-modules", "kernel-diff"},
    ),
    "kernels compiled": (
        [*TRAINING, "vocab_size=200", "pass=forward", "precision=fp32", "compile=eager,blocks", "attention=naive"],
        [],
        {"ok": 2},
        {"kernel-classes", "kernel-diff"},
    ),
    "precision": (
        [*TRAINING, "vocab_size=200", "matrix_size=64", "precision=fp32,bf16", "compile=eager"],
        [],
        {"ok": 4},
        {"precision", "utilisation", "timings"},
    ),
    "memory": (
        [*TRAINING, "precision=fp32,bf16"],
        ["task=train_step"],
        {"ok": 4},
        {"memory", "saved-tensors"},
    ),
    "memory of attention": (
        [*STEPS, "batch_size=2", "d_head=8", "context_length=16", "precision=fp32", "attention=naive,math"],
        ["task=attention"],
        {"ok": 2},
        {"memory", "attention"},
    ),
    "oom-map": (
        [*TRAINING, "memory_limit_gib=1", "precision=fp32"],
        [],
        {"ok": 2},
        {"oom-map"},
    ),
    "fits-24gb": ([*TRAINING, "vocab_size=200"], [], {"ok": 5}, {"memory"}),
    "checkpointing": (
        [*TRAINING, "vocab_size=200", "checkpointing=none,groups:2,selective"],
        [],
        {"ok": 6},
        {"memory", "timings", "tradeoffs"},
    ),
    "optimizers": (
        [*TRAINING, "vocab_size=200"], ["optimizer=sgd"], {"ok": 2}, {"memory", "timings"},
    ),
    "long-context": ([*TRAINING, "vocab_size=200"], [], {"ok": 4}, {"memory"}),
    "accumulation": ([*TRAINING, "vocab_size=200"], [], {"ok": 6}, {"memory", "timings", "tradeoffs"}),
    "leaderboard": (
        [
            *STEPS, "d_model=32", "d_ff=64", "num_layers=2", "num_heads=2", "vocab_size=200", "context_length=8",
            "batch_size=1",
        ],
        [],
        {"ok": 2},
        {"timings"},
    ),
    "numerics": (
        ["accumulator=fp32", "addend=fp16", "upcast=false", "at_once=false", "autocast=bf16", "norm=rms_norm", "dtype=fp16",
         "scale=1.0", "width=64", "eps=0.01"],
        ["seed=0"],
        {"ok": 4},
        {"accumulation", "autocast-dtypes", "norms"},
    ),
}  # fmt: skip


@pytest.mark.docs
@pytest.mark.parametrize("name", SMALL)
def test_a_small_version_runs(name: str, sweep_here: Callable[..., Result], tmp_path: Path) -> None:
    if "compile" in name and not shutil.which("g++"):
        pytest.skip("torch.compile on the CPU needs a C++ compiler")
    sets, wheres, statuses, tables = SMALL[name]
    options = [word for one in sets for word in ("--set", one)] + [
        word for one in wheres for word in ("--where", one)
    ]
    done = sweep_here(
        "run",
        ROOT / "configs" / f"{name.split()[0]}.yaml",
        *options,
        "--out",
        "out",
        "--scheduler",
        "serial",
    )
    assert done.exit_code == 0, done.output
    cells = pd.read_parquet(tmp_path / "out" / "cells.parquet")
    assert cells["status"].value_counts().to_dict() == statuses
    if name == "compile":
        compiled = cells[cells["compile"] == "blocks"].iloc[0]
        assert (
            compiled["compile_cache"],
            compiled["compile_cache_seen"],
            compiled["compile_recompiles"],
        ) == ("cold", "cold", 0)
        assert not list((tmp_path / "out").rglob("fxgraph"))  # its own cache went with it
    if name == "kernels":
        assert len(list((tmp_path / "out").rglob("trace_*.json.gz"))) == len(cells)
        assert (
            cells["attributed_to_module"].median() > 0.95
        )  # a share of time: a busy neighbour may fall on what is of no module
        assert (cells["profile_cost"] > 0).all()
    printed = sweep_here(
        "report", "out", *(word for table in sorted(tables) for word in ("--table", table))
    )
    assert printed.exit_code == 0, printed.output
    titles = {table.title for table in TABLES if table.name in tables}
    assert titles <= set(printed.stdout.splitlines())


def test_half_of_the_gate_is_gpu_bound_and_all_of_it_fits_80_gb() -> None:
    config, source = load_config(ROOT / "configs" / "gate.yaml")
    cells = expand(config, source, Selection()).cells
    assert len(cells) == 40
    assert "kernel_time" in config.instruments
    axes = ["size", "context_length", "precision", "compile", "pass"]
    published = load_results(Run(ROOT / "results" / "published" / "h200" / "full")).cells
    known = published.assign(bound=bound_by(published)).set_index(axes)
    rows = [known.loc[tuple(cell.params.values()[axis] for axis in axes)] for cell in cells]
    assert Counter(row["bound"] for row in rows) == {BoundBy.GPU: 20, BoundBy.CPU: 20}
    assert max(row["peak_allocated_bytes"] for row in rows) < 0.9 * find_gpu("H100").usable_bytes
    assert {cell.params.values()["timing"] for cell in cells} == {"adaptive"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        "accumulation",
        "checkpointing",
        "fits-24gb",
        "leaderboard",
        "long-context",
        "models",
        "optimizers",
    ],
)
def test_a_recipe_for_everyday_training_is_predicted_without_a_gpu(recipe: str) -> None:
    if recipe == "models":
        pytest.importorskip("transformers")
    path = ROOT / "configs" / f"{recipe}.yaml"
    cell = resolve(path, parse_selection([], [])).expansion.cells[-1]
    usable_bytes = find_gpu("RTX 4090").usable_bytes
    prediction = Predictor().predict(PredictionRequest(cell, (usable_bytes,))).of_cell(cell)
    assert prediction.how in ("tracked", "modelled", "compiled"), prediction.reason
    assert prediction.verdicts.keys() == {usable_bytes}
