"""Each table of each write-up is answered by the table `reference` and by columns of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from orchestrator.analysis.results import Results, load_results
from orchestrator.common.reference_devices import ALL
from orchestrator.report.references.counterparts import _TENSORS, COUNTERPARTS, Figures
from orchestrator.report.references.records import ReferenceNumber, published, writeups
from orchestrator.report.references.tables import NAME, reference_tables
from orchestrator.report.tables.registry import lay_out
from orchestrator.report.tables.table import RenderedTable
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from tasks.spec.attempt import Attempt, Settings
from tasks.spec.outcome import Outcome
from tasks.spec.registry import make_cell
from tasks.spec.status import Status
from tasks.spec.tables import WHOLE_STEP, AllocationRow, KernelRow, Sample
from tests.conftest import ROOT
from tests.orchestrator.report.references.transcription import Metric
from tests.support.tables import texts_of

# One worker makes what these tests share.
pytestmark = pytest.mark.xdist_group("every kind")

TABLES = [(one["name"], table["name"]) for one in writeups() for table in one["table"]]
TITLES = {
    (one["name"], table["name"]): table["title"] for one in writeups() for table in one["table"]
}
REPEATED = {
    (one["name"], table["name"]): table["repeats"]
    for one in writeups()
    for table in one["table"]
    if "repeats" in table
}
PHASES = ("forward", "backward", "communication", "optimizer", "step")
MODULES = ("scores", "softmax", "attention output")
PARTS = (*MODULES, "ffn", "norm", "embedding", "attention", "residual")

# The frame and column of a run that answers each metric, in rows of the table `reference`.
COLUMNS = {
    "duration": "cells.{phase}_ms_{statistic}",
    "call": "cells.step_ms_{statistic}",  # over the calls of a step
    "tokens_per_gpu": "cells.tokens_per_s_per_gpu",
    "peak": "cells.peak_allocated_bytes",
    "held": "cells.{phase}_held_allocated_bytes",
    "saved": "cells.saved_bytes",
    "saved_squares": "cells.saved_squares",
    "tensor": "cells.{tensor}",
    "allocation": "allocations.size_bytes",
    "gemm_share": "kernels.ms",
    "kernel_share": "kernels.ms",
    "part_time": "kernels.ms",
    "softmax_over_matmul": "kernels.ms",
    "sum": "cells.sum",
    "absolute_error": "cells.error",
}
# Why the other metrics have no row. Each stands in a table of which other numbers have rows.
WITHOUT_ROWS = {
    "total": "mean times steps, in the same row",
    "warmup_total": "depends on what the warm-up includes, such as loading kernels",
    "peak_more": "difference of two peaks of the same table",
    "held_more": "difference of two held amounts of the same row",
    "allocation_more": "difference of two allocations of the same row",
    "held_per_pair": "quotient of the previous column and the squared length",
    "saved_and_state": "calculated: saved tensors plus parameters and optimizer state",
    "speed_up": "quotient of two times of the same row",
    "communication_share": "quotient of two times of the same row",
    "part_share": "quotient of two times of the same table",
    "kernel_time": "one kernel of one GPU, summed over an unknown number of steps",
    "kernel_launches": "one kernel of one GPU, counted over an unknown number of steps",
    "kernel_duration": "one kernel of one GPU; its share of the kernel time has a row",
    "parameters": "the same closed form as ours: test_transcription compares them",
}
COLUMNS_OF_TABLES = {
    "analysis report": {
        "timings": "cells.forward_ms_mean cells.step_ms_mean",
        "timings-nsys": "cells.forward_ms_mean",
        "top-kernels": "kernels.ms",
        "top-not-gemm": "kernels.ms",
        "gemm-share": "kernels.ms",
        "softmax-matmul": "kernels.ms",
        "softmax-matmul-ratio": "kernels.ms",
        "accumulation": "cells.sum",
        "mixed-forward": "cells.forward_ms_median",
        "mixed-both": "cells.step_ms_median",
        "mixed-scores": "kernels.ms",
        "memory": "cells.peak_allocated_bytes",
        "memory-autocast": "cells.peak_allocated_bytes",
        "memory-compared": "repeats memory",
        "residual-stream": "cells.residual_stream_bytes",
        "allocations": "allocations.size_bytes",
        "top-allocations": "allocations.size_bytes",
        "attention-forward": "cells.forward_ms_mean",
        "attention-backward": "cells.backward_ms_mean",
        "attention-memory": "cells.forward_held_allocated_bytes",
        "attention-accounting": "cells.square_bytes cells.forward_held_allocated_bytes",
        "attention-squares": "cells.saved_squares cells.saved_bytes",
        "jit": "cells.step_ms_mean cells.peak_allocated_bytes",
    },
    "answer.md": {
        "timings": "cells.forward_ms_mean cells.backward_ms_mean",
        "timings-nsys": "cells.forward_ms_mean cells.backward_ms_mean",
        "kernels-forward": "kernels.ms",
        "kernels-both": "kernels.ms",
        "softmax-in-attention": "kernels.ms",
        "accumulation": "cells.sum cells.error",
        "timings-bf16-large": "cells.forward_ms_mean cells.backward_ms_mean",
        "steps-bf16-large": "cells.step_ms_mean",
        "timings-fp32-large": "repeats timings-nsys",
        "timings-bf16-2.7B": "cells.forward_ms_mean cells.backward_ms_mean",
        "steps-bf16-2.7B": "cells.step_ms_mean",
        "timings-fp32-2.7B": "repeats timings-nsys",
        "memory": "cells.peak_allocated_bytes",
        "memory-bf16": "cells.peak_allocated_bytes",
        "largest-allocations": "allocations.size_bytes",
        "memory-calculated": "cells.saved_bytes",
        "attention": (
            "cells.forward_ms_mean cells.backward_ms_mean cells.forward_held_allocated_bytes "
            "cells.peak_allocated_bytes"
        ),
        "attention-scaling": "cells.forward_held_allocated_bytes",
    },
    "assignment report": {
        "timings-macbook-air": "cells.forward_ms_mean cells.backward_ms_mean cells.step_ms_mean",
        "timings": "cells.forward_ms_mean cells.backward_ms_mean cells.step_ms_mean",
        "timings-no-warm-up": "cells.forward_ms_mean cells.backward_ms_mean cells.step_ms_mean",
        "timings-one-warm-up": "cells.forward_ms_mean cells.backward_ms_mean cells.step_ms_mean",
        "timings-bf16": "cells.forward_ms_mean cells.backward_ms_mean cells.step_ms_mean",
        "timings-compiled": "cells.forward_ms_mean cells.backward_ms_mean cells.step_ms_mean",
        "timings-compiled-bf16": "cells.forward_ms_mean cells.backward_ms_mean cells.step_ms_mean",
        "accumulation": "cells.sum",
        "attention-m4": (
            "cells.forward_ms_mean cells.backward_ms_mean cells.step_ms_mean "
            "cells.built_held_allocated_bytes cells.forward_held_allocated_bytes "
            "cells.backward_held_allocated_bytes"
        ),
        "attention-m4-compiled": (
            "cells.forward_ms_mean cells.backward_ms_mean cells.step_ms_mean "
            "cells.built_held_allocated_bytes cells.forward_held_allocated_bytes "
            "cells.backward_held_allocated_bytes"
        ),
        "attention": (
            "cells.forward_ms_mean cells.backward_ms_mean cells.step_ms_mean "
            "cells.built_held_allocated_bytes cells.forward_held_allocated_bytes "
            "cells.backward_held_allocated_bytes"
        ),
        "attention-compiled": (
            "cells.forward_ms_mean cells.backward_ms_mean cells.step_ms_mean "
            "cells.built_held_allocated_bytes cells.forward_held_allocated_bytes "
            "cells.backward_held_allocated_bytes"
        ),
        "attention-compiled-bf16": (
            "cells.forward_ms_mean cells.backward_ms_mean cells.step_ms_mean "
            "cells.built_held_allocated_bytes cells.forward_held_allocated_bytes "
            "cells.backward_held_allocated_bytes"
        ),
    },
    "damek": {
        "all-reduce": "cells.step_ms_mean",
        "naive": "cells.step_ms_mean cells.communication_ms_mean",
        "overlap": "cells.step_ms_mean cells.communication_ms_mean",
        "buckets": "cells.step_ms_mean cells.communication_ms_mean",
        "sharding": "cells.step_ms_mean cells.backward_held_allocated_bytes",
    },
    "ShibukiZero": {
        "all-reduce": "cells.step_ms_mean",
        "all-reduce-gloo": "cells.step_ms_mean",
        "strategies": "cells.step_ms_mean cells.communication_ms_mean",
        "buckets": "cells.step_ms_mean",
        "strategies-earlier": (
            "cells.step_ms_mean cells.communication_ms_mean cells.optimizer_ms_mean"
        ),
        "buckets-earlier": "cells.step_ms_mean cells.communication_ms_mean",
        "sharding": "cells.optimizer_ms_mean cells.step_ms_mean cells.peak_allocated_bytes",
    },
    "torchtitan": {"fsdp": "cells.tokens_per_s_per_gpu cells.peak_allocated_bytes"},
    "writeup.tex": {
        "all-reduce": "cells.step_ms_mean",
        "strategies": "cells.step_ms_mean cells.communication_ms_mean",
        "sharding": "cells.step_ms_mean cells.peak_allocated_bytes",
    },
    "section 1.2": {
        "attention": (
            "cells.forward_ms_mean cells.backward_ms_mean cells.forward_held_allocated_bytes"
        ),
        "attention-compiled": (
            "cells.forward_ms_mean cells.backward_ms_mean cells.forward_held_allocated_bytes"
        ),
        "forward-compiled": "cells.forward_ms_mean",
        "forward-compiled-rounded": "repeats forward-compiled",
        "forward": "cells.forward_ms_mean",
        "forward-rounded": "repeats forward",
        "step-compiled": "cells.step_ms_mean",
        "step-compiled-rounded": "repeats step-compiled",
        "step": "cells.step_ms_mean",
        "step-rounded": "repeats step",
    },
    "yyin-dev": {
        "kernels-forward": "kernels.ms",
        "kernels-backward": "kernels.ms",
        "kernels-both": "kernels.ms",
        "kernels-not-matmul": "kernels.ms",
        "kernels-step": "kernels.ms",
        "gemm-share": "kernels.ms",
        "softmax-in-attention": "kernels.ms",
        "accumulation": "cells.sum",
        "mixed-precision": "cells.step_ms_mean",
        "memory": "cells.peak_allocated_bytes",
        "memory-mixed": "cells.peak_allocated_bytes",
        "residual-stream": "cells.residual_stream_bytes",
        "largest-allocation": "allocations.size_bytes",
        "attention": (
            "cells.forward_ms_mean cells.forward_held_allocated_bytes cells.backward_ms_mean"
        ),
        "attention-compiled": (
            "cells.forward_ms_mean cells.backward_ms_mean cells.forward_held_allocated_bytes"
        ),
        "training-compiled": "cells.step_ms_mean",
    },
}


def cell_params(number: ReferenceNumber) -> dict[str, object]:
    """Return the parameters of the first cell that a number may belong to, on a GPU."""
    named = {axis: values[0] for axis, values in number.axes.items()}
    base: dict[str, object] = {}
    if number.task == "train_step":
        base = {"size": "small", "context_length": 128, "year": number.year}
    if number.task == "attention" and "attention" not in named:
        base = {"attention": "naive"}
    is_on_cpu = number.task == "accumulation" or "processes" in named
    return {"device": "cpu" if is_on_cpu else "cuda", **base, **named}


def outcome_of(number: ReferenceNumber) -> Outcome:
    """Return an outcome with every instrument: 10 ms for each phase, 1 GiB for each kind of memory."""
    attempt = Attempt(make_cell(number.task, cell_params(number)), 1, "/nowhere", Settings())
    timings = [Sample("timing", "duration", "ms", 10.0, "synced", phase, 0) for phase in PHASES]
    memory = [
        Sample("memory", f"{what}_allocated_bytes", "bytes", 2.0**30, mode, phase)
        for mode, phase in (
            ("built", ""),
            ("steady", "forward"),
            ("steady", "backward"),
            ("steady", "optimizer"),
        )
        for what in ("held", "peak")
    ]
    saved = [
        Sample("memory", metric, "bytes", 2.0**30, "steady", "")
        for metric in ("saved_bytes", "residual_stream_bytes", "saved_squares")
    ]
    watched = [
        Sample("kernels", "attributed_to_phase", "1", 1.0, "profiled"),
        Sample("memory_snapshot", "peak_allocated_bytes", "bytes", 2.0**30, "steady"),
        Sample("finding", "sum", "1", 10.0),
        Sample("finding", "error", "1", 0.01),
    ]
    kernels = [
        KernelRow(
            phase,
            module,
            kind,
            "scope",
            "aten::mm",
            f"{module} {copy}",
            1,
            4,
            ns,
            1e6,
            1e6,
            1,
            2,
            0.5,
        )
        for phase in ("forward", "backward", "optimizer")
        for copy in range(4)
        for module, kind, ns in zip(
            MODULES, ("GEMM", "softmax", "GEMM"), (10**6, 2 * 10**6, 3 * 10**6), strict=True
        )
    ]
    roles = [("activations", part) for part in PARTS] + [
        ("gradients", "ffn"),
        ("optimizer state", "ffn"),
    ]
    allocations = [
        AllocationRow("peak", "backward", role, part, "scope", "forward", "", 2**20, 12, 12 * 2**20)
        for role, part in roles
    ]
    samples = (*timings, *memory, *saved, *watched)
    measured = {"samples": samples, "kernels": tuple(kernels), "allocations": tuple(allocations)}
    facts = {"collective_calls": 2} if number.task == "collectives" else {"tokens": 1000}
    return Outcome(attempt, Status.OK, "", "", {}, facts, started_at=1.7e9, wall_s=2.5, **measured)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A run with one cell for each published table."""
    first: dict[tuple[str, str], ReferenceNumber] = {}
    for number in published():
        if number.amount is not None and number.metric in COUNTERPARTS:
            first.setdefault((number.writeup, number.table), number)
    run = Run(tmp_path_factory.mktemp("counterparts") / "run")
    with open_for_writing(run) as writer:
        writer.write_manifest({"name": "ours"})
        outcomes = {one.attempt.cell.id: one for one in map(outcome_of, first.values())}
        for outcome in outcomes.values():
            writer.append(outcome, None)
    return load_results(run)


@pytest.fixture(scope="module")
def page(results: Results) -> RenderedTable:
    (found,) = lay_out(results, [NAME], reference_tables(ALL))
    return found


def columns_for(key: tuple[str, str]) -> list[str]:
    """Return the columns of a run that answer the numbers of a published table."""
    found: dict[str, None] = {}
    for number in published():
        shown = number.metric in COUNTERPARTS and number.statistic not in ("sd", "rounded")
        if (number.writeup, number.table) != key or not shown:
            continue
        tensor = _TENSORS.get(number.labels.get("part", ""), "")
        if number.metric == "tensor" and not tensor:
            continue  # Q, K, V and the output are not measured one by one
        column = COLUMNS[number.metric].format(
            phase=number.phase, statistic=number.statistic, tensor=tensor
        )
        found[column] = None
    return list(found)


def test_every_published_table_has_an_entry() -> None:
    listed = [(writeup, table) for writeup, tables in COLUMNS_OF_TABLES.items() for table in tables]
    assert sorted(listed) == sorted(TABLES)
    assert len(TABLES) == 80 + 7 + 5 + 1 + 3


def test_every_metric_has_rows_or_a_reason() -> None:
    assert set(COLUMNS) == set(COUNTERPARTS)
    assert set(COLUMNS) | set(WITHOUT_ROWS) == set(get_args(Metric))
    assert not set(COLUMNS) & set(WITHOUT_ROWS)


def test_an_entry_names_the_columns_that_answer_the_table() -> None:
    named = {key: COLUMNS_OF_TABLES[key[0]][key[1]] for key in TABLES}
    assert {key: named[key] for key in REPEATED} == {
        key: f"repeats {table}" for key, table in REPEATED.items()
    }
    columns = {key: text.split() for key, text in named.items() if key not in REPEATED}
    assert columns == {key: columns_for(key) for key in columns}


def test_columns_that_counterparts_name_exist_in_their_frames(
    results_of_every_kind: Results,
) -> None:
    of_two_gpus = load_results(Run(ROOT / "results" / "published" / "h100x2" / "parallel"))
    frames = {
        "cells": {*results_of_every_kind.cells, *of_two_gpus.cells},
        "kernels": results_of_every_kind.kernels(),
        "allocations": results_of_every_kind.allocations(),
    }
    entries = {text for tables in COLUMNS_OF_TABLES.values() for text in tables.values()}
    columns = {name for text in entries if "repeats" not in text for name in text.split()}
    for name in columns:
        frame, column = name.split(".")
        assert column in frames[frame], name


def test_every_published_table_has_a_row_in_reference(page: RenderedTable) -> None:
    sources = [row["source"] for row in rows_of(page)]
    without = []
    for key in set(TABLES) - set(REPEATED):
        source = f"{key[0]}: {TITLES[key]}"
        if not any(text.startswith((f"{source} (", f"{source}: ")) for text in sources):
            without.append(source)
    assert not without


def test_the_largest_allocation_of_a_part_is_that_of_the_step(tmp_path: Path) -> None:
    """Older runs have allocations at the peak only, and the largest of these counts."""
    by_part = (one for one in published() if one.metric == "allocation" and "part" in one.labels)
    number = next(one for one in by_part if one.labels["part"] == "AttnScores")
    outcome = outcome_of(number)
    larger = replace(
        outcome.allocations[PARTS.index("scores")],
        moment=WHOLE_STEP, size_bytes=2**21, count=0, total_bytes=0,
    )  # fmt: skip
    for folder, more, wanted in (("old", (), 2**20), ("new", (larger,), 2**21)):
        run = Run(tmp_path / folder)
        with open_for_writing(run) as writer:
            writer.write_manifest({"name": "ours"})
            writer.append(replace(outcome, allocations=(*outcome.allocations, *more)), None)
        results = load_results(run)
        (row,) = results.cells.to_dict("records")
        assert COUNTERPARTS["allocation"].ours(number, row, Figures(results)) == wanted


def test_a_row_has_a_ratio_if_it_is_comparable(page: RenderedTable) -> None:
    """No ratio: its shape is not stated, their cell ran out of memory, or they printed zero."""
    wrong = []
    for row in rows_of(page):
        numbers = [] if row["note"] == "–" else row["note"].split(", ")
        notes = " ".join(page.grid.notes[int(number) - 1] for number in numbers)
        is_comparable = "No ratio" not in notes and row["theirs"] != "OOM"
        has_ratio = row["ratio"] != "–"
        if has_ratio is not is_comparable and not row["theirs"].startswith("0.00"):
            wrong.append(row)
    assert not wrong


def rows_of(page: RenderedTable) -> list[dict[str, str]]:
    return [dict(zip(page.header, row, strict=True)) for row in texts_of(page)]
