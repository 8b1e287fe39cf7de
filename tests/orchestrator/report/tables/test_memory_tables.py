"""Tables of memory: predicted and measured, next to each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from orchestrator.analysis.results import Results, load_results
from orchestrator.report.tables.registry import lay_out
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from tasks.spec.attempt import Attempt, Settings
from tasks.spec.outcome import Outcome
from tasks.spec.registry import make_cell
from tasks.spec.status import Status
from tasks.spec.tables import Sample
from tests.support.tables import texts_of

MIB, GIB = 1024**2, 1024**3
Samples = Iterable[Sample]


@pytest.fixture
def results_of(tmp_path: Path) -> Callable[..., Results]:
    """Results of cells, each with its measured and its predicted samples."""

    def make(task: str, *cells: tuple[dict[str, Any], Samples, Samples]) -> Results:
        with open_for_writing(Run(tmp_path / "run")) as writer:
            writer.write_manifest({"name": "test"})
            for params, measured, predicted in cells:
                cell = make_cell(task, params)
                attempt = Attempt(cell, 1, "/nowhere", Settings())
                writer.append(
                    Outcome(attempt, Status.OK, "", "", {}, {}, tuple(measured), 1.7e9, 1.0), None
                )
                writer.append_predictions({cell.id: predicted})
            return load_results(writer)

    return make


def table(results: Results, name: str) -> pd.DataFrame:
    (page,) = lay_out(results, [name])
    return pd.DataFrame(texts_of(page), columns=page.header)


def saved(instrument: str, *operations: tuple[str, float]) -> list[Sample]:
    return [
        Sample(instrument, "saved_block_bytes", "bytes", 10 * MIB, "steady"),
        Sample(instrument, "residual_stream_bytes", "bytes", MIB, "steady"),
        *(
            Sample(
                instrument,
                "saved_operation_bytes",
                "bytes",
                mib * MIB,
                "steady",
                step=rank,
                note=operation,
            )
            for rank, (operation, mib) in enumerate(operations, start=1)
        ),
    ]


def test_saved_tensors_are_compared_by_their_operation(
    results_of: Callable[..., Results],
) -> None:
    results = results_of(
        "train_step",
        (
            {"size": "tiny"},
            saved("memory", ("ffn", 4), ("attn", 3)),
            saved("prediction", ("attn", 3), ("ffn", 2)),
        ),
        ({"size": "tiny", "compile": "blocks"}, [], saved("prediction", ("ffn", 4))),
    )
    rows = table(results, "saved-tensors")
    eager, compiled = (
        rows[rows["compile"] == how].set_index("what") for how in ("eager", "blocks")
    )
    assert list(eager.index) == ["one block", "1.", "2.", "residual stream"]
    assert list(eager["saved by"]) == ["–", "ffn", "attn", "–"]
    assert list(eager["predicted MiB"]) == ["10.00", "2.00", "3.00", "1.00"]
    assert list(eager["measured MiB"]) == ["10.00", "4.00", "3.00", "1.00"]
    assert list(eager["of the block"]) == ["100.0%", "40.0%", "30.0%", "10.0%"]
    assert list(compiled.loc["1.", ["saved by", "predicted MiB", "measured MiB"]]) == [
        "ffn",
        "4.00",
        "–",
    ]


def by_formula(**gib: float) -> list[Sample]:
    return [
        Sample(
            "prediction",
            "closed_form_bytes",
            "bytes",
            value * GIB,
            "steady",
            note=term.replace("__", ": ").replace("_", " "),
        )
        for term, value in gib.items()
    ]


def test_parts_of_the_peak_by_prediction_and_by_formula(
    results_of: Callable[..., Results],
) -> None:
    peak = [
        Sample(
            "prediction",
            "peak_allocated_bytes",
            "bytes",
            11 * GIB,
            "steady",
            "backward",
            note="tracked",
        ),
        Sample("prediction", "at_peak_bytes", "bytes", 2 * GIB, "steady", note="parameters"),
    ]
    measured = [Sample("memory", "peak_allocated_bytes", "bytes", 12.5 * GIB, "steady", "backward")]
    whole = by_formula(
        parameters=1,
        activations__ffn=2,
        activations__attention_squares=3,
        activations__norm=3,
        temporary=1,
    )
    results = results_of(
        "train_step",
        ({"size": "tiny"}, measured, [*peak, *whole]),
        (
            {"model": "a:B"},
            [],
            [
                Sample("prediction", "peak_allocated_bytes", "bytes", None, note="why"),
                *by_formula(parameters=4),
            ],
        ),
    )
    rows = table(results, "memory-parts").set_index(["size", "source"])
    shown = ["parameters", "attention squares", "activations", "temporary"]
    whole_columns = ["at least", "in all", "peak", "ratio"]
    formula, prediction = rows.loc[("tiny", "formula")], rows.loc[("tiny", "predicted")]
    assert list(formula[shown]) == ["1.00", "3.00", "5.00", "1.00"]
    assert list(formula[whole_columns]) == ["–", "10.00", "12.50", "0.8000"]
    assert list(prediction[shown]) == ["2.00", "–", "–", "–"]
    assert list(prediction[whole_columns]) == ["–", "11.00", "12.50", "0.8800"]
    without_data = rows.loc[("–", "formula"), ["parameters", *whole_columns]]
    assert list(without_data) == ["4.00", "4.00", "–", "–", "–"]


def test_squares_of_attention_by_formula_predicted_and_measured(
    results_of: Callable[..., Results],
) -> None:
    def sizes(instrument: str, saved_gib: float, forward_gib: float) -> list[Sample]:
        return [
            Sample(instrument, "saved_square_bytes", "bytes", saved_gib * GIB, "steady"),
            Sample(instrument, "held_allocated_bytes", "bytes", GIB, "built"),
            Sample(
                instrument,
                "peak_allocated_bytes",
                "bytes",
                (forward_gib + 1) * GIB,
                "steady",
                "forward",
            ),
        ]

    formula = [
        Sample("prediction", "square_bytes", "bytes", 2 * GIB, "steady"),
        Sample("prediction", "formula_saved_squares", "tensors", 2, "steady"),
        Sample("prediction", "formula_forward_squares", "tensors", 4, "steady"),
    ]
    results = results_of(
        "attention",
        (
            {"attention": "naive"},
            sizes("memory", 4, 8.5),
            [*sizes("prediction", 4, 8.25), *formula],
        ),
        ({"attention": "sdpa"}, sizes("memory", 0, 1), sizes("prediction", 0, 1)),
    )
    rows = table(results, "attention-memory").set_index("what")
    assert list(rows.index) == ["saved", "in forward"]
    assert list(rows.loc["saved", rows.columns[-4:]]) == ["2·Bn²", "4.00", "4.00", "4.00"]
    assert list(rows.loc["in forward", rows.columns[-4:]]) == ["4·Bn²", "8.00", "8.25", "8.50"]


OF_ONE_GPU = {
    "peak_requested_bytes": 10.0,
    "peak_allocated_bytes": 10.5,
    "peak_reserved_bytes": 12.0,
    "outside_allocator_bytes": 0.75,
}


def account_of(
    tmp_path: Path, sizes: Mapping[str, float], gpus: int = 1, **fields: Any
) -> list[str]:
    """Return the row of a cell with these samples in GiB, behind its axes."""
    several = {"gpus": gpus, "parallel": "ddp"} if gpus > 1 else {}
    cell = make_cell("train_step", {"device": "cuda", "size": "tiny", **several})
    attempt = Attempt(cell, 1, "", Settings())
    samples = tuple(
        Sample("memory", name, "bytes", gib * GIB, "steady", "forward" if "peak" in name else "")
        for name, gib in sizes.items()
    )
    whole = Outcome(attempt, Status.OK, "", "", {}, {}, samples, 1.7e9, 1.0)
    with open_for_writing(Run(tmp_path / "run")) as writer:
        writer.write_manifest({"name": "test"})
        writer.append(replace(whole, **fields), None)
        results = load_results(writer)
    row = table(results, "device-memory").iloc[0]
    first = next(number for number, name in enumerate(row.index) if "requested" in name)
    return [f"{name.removesuffix(' (GiB)')}: {text}" for name, text in row.items()][first:]


def test_an_account_of_the_memory_on_a_gpu_adds_up(tmp_path: Path) -> None:
    assert account_of(tmp_path, OF_ONE_GPU) == [
        "requested: 10.00", "+ rounding: 0.50", "= allocated: 10.50", "+ cached: 1.50",
        "= reserved: 12.00", "+ context: 0.75", "= in use: 12.75",
    ]  # fmt: skip


def test_the_memory_of_nccl_is_outside_of_the_allocator(tmp_path: Path) -> None:
    facts = {"nccl_device_bytes": GIB // 4}
    assert account_of(tmp_path, OF_ONE_GPU, 2, facts=facts)[4:] == [
        "= reserved: 12.00", "+ NCCL: 0.25", "+ context: 0.50", "= in use: 12.75",
    ]  # fmt: skip
    unknown = account_of(tmp_path / "unknown", OF_ONE_GPU, 2)
    assert unknown[5:] == ["+ NCCL: unknown", "+ context: unknown", "= in use: 12.75"]


def test_what_is_unknown_on_a_gpu_is_not_zero(tmp_path: Path) -> None:
    older = {name: gib for name, gib in OF_ONE_GPU.items() if name != "outside_allocator_bytes"}
    assert account_of(tmp_path, older)[4:] == [
        "= reserved: 12.00", "+ context: unknown", "= in use: unknown",
    ]  # fmt: skip


def test_the_account_of_a_cell_that_ran_out_of_memory_is_of_that_moment(tmp_path: Path) -> None:
    evidence = {"allocated": 75, "reserved": 78, "free": 0.5, "total": 79.25}
    sizes = {f"{name}_bytes": int(gib * GIB) for name, gib in evidence.items()}
    assert account_of(tmp_path, {}, status=Status.OOM, evidence=sizes) == [
        "requested: OOM", "= allocated: 75.00", "+ cached: 3.00", "= reserved: 78.00",
        "+ context: 0.75", "= in use: 78.75",
    ]  # fmt: skip
