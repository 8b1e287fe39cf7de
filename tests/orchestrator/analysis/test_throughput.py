"""FLOPs of cells without a closed form, and utilisation with what is computed again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from orchestrator.analysis.cells import derive_cells
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from tasks.spec.attempt import Attempt, Settings
from tasks.spec.metrics import metric_named
from tasks.spec.outcome import Outcome
from tasks.spec.registry import make_cell
from tasks.spec.status import Status
from tasks.spec.tables import Sample


def row_with_counts(tmp_path: Path, *counted: Sample) -> dict[str, object]:
    """Return the cell of a model without a formula that took 1 ms a step, with these counts."""
    run = Run(tmp_path / "run")
    facts = {"gpu": "NVIDIA H100 80GB HBM3", "tokens": 16}
    steps = tuple(Sample("timing", "duration", "ms", 1.0, "synced", "step", n) for n in range(3))
    model = {"model": "a:B", "precision": "bf16"}
    cell = make_cell("train_step", model | {"checkpointing": "blocks"})
    attempt = Attempt(cell, 1, "/nowhere", Settings())
    with open_for_writing(run) as writer:
        writer.append(Outcome(attempt, Status.OK, "", "", {}, facts, steps, 1.7e9, 2.5), None)
        writer.append_predictions({cell.id: counted})
    (row,) = derive_cells(
        run.read("attempts"), run.read("samples"), run.read("predictions")
    ).to_dict("records")
    return dict(row)


def test_counted_flops_stand_in_for_a_closed_form_and_repeated_ones_count_in_hfu(
    tmp_path: Path,
) -> None:
    counted = [
        metric_named("prediction", name).sample(value, "steady", phase)
        for name, value, phase in (
            ("flops", 1e11, "forward"),
            ("flops", 2e11, "backward"),
            ("recomputed_flops", 9e10, "backward"),
        )
    ]
    row = row_with_counts(tmp_path, *counted)
    assert row["flops"] == 3e11
    assert row["mfu"] == pytest.approx(3e11 / 1e-3 / 989.4e12, rel=1e-3)
    assert row["hfu"] == pytest.approx(1.3 * row["mfu"])


def test_flops_that_cannot_be_counted_give_no_utilisation(tmp_path: Path) -> None:
    reason = "FLOPs undercounted: 2 operations unknown: mine::a, mine::b"
    flops = metric_named("prediction", "flops").sample(None, "steady", "forward", note=reason)
    row = row_with_counts(tmp_path, flops)
    assert row["flops_reason"] == reason
    assert pd.isna(row.get("flops"))
    assert pd.isna(row.get("mfu"))


def test_flops_that_fit_in_no_integer_column_are_still_counted(
    make_outcome: Callable[..., Outcome], tmp_path: Path
) -> None:
    run = Run(tmp_path / "run")
    outcome = make_outcome()
    facts = {**outcome.facts, "flops": {"forward": 10**19, "backward": 2 * 10**19}}
    with open_for_writing(run) as writer:
        writer.append(replace(outcome, facts=facts), None)
    (row,) = derive_cells(run.read("attempts"), run.read("samples")).to_dict("records")
    assert row["flops"] == 3e19


@pytest.mark.parametrize(
    ("link", "peak", "share"),
    [
        ({"link": "NVLink 4 × 18"}, 450.0, 0.5),
        ({"link": "NVLink 4 × 18 (0–1); PCIe 5.0 × 16 (0–2 1–2)"}, 63.0, 225 / 63),
        ({"link": "unknown: NVMLError_NotSupported"}, None, None),
        ({"link": 3}, None, None),  # a text is expected
        ({}, None, None),  # an older result
    ],
)
def test_bus_bandwidth_is_compared_with_the_peak_of_the_slowest_link(
    tmp_path: Path, link: dict[str, object], peak: float | None, share: float | None
) -> None:
    run = Run(tmp_path / "run")
    cell = make_cell("collectives", {"device": "cuda", "gpus": 2})
    steps = tuple(Sample("timing", "duration", "ms", 1.0, "synced", "step", n) for n in range(3))
    attempt = Attempt(cell, 1, "/nowhere", Settings())
    facts = {"bus_bytes": 225_000_000, **link}
    with open_for_writing(run) as writer:
        writer.append(Outcome(attempt, Status.OK, "", "", {}, facts, steps, 1.7e9, 2.5), None)
    (row,) = derive_cells(run.read("attempts"), run.read("samples")).to_dict("records")
    assert row["busbw_gb_s"] == pytest.approx(225)
    found = [row.get(name) for name in ("link_peak_gb_s", "of_link")]
    wanted = [None if one is None else pytest.approx(one, rel=1e-3) for one in (peak, share)]
    assert [None if pd.isna(one) else one for one in found] == wanted


@pytest.mark.parametrize(
    ("ranks", "per_gpu"),
    [({"device": "cuda", "gpus": 2}, 8000.0), ({"device": "cpu", "processes": 2}, None)],
)
def test_only_a_gpu_has_tokens_per_second(
    tmp_path: Path, ranks: dict[str, object], per_gpu: float | None
) -> None:
    run = Run(tmp_path / "run")
    cell = make_cell("train_step", ranks | {"size": "tiny", "parallel": "ddp"})
    steps = tuple(Sample("timing", "duration", "ms", 1.0, "synced", "step", n) for n in range(3))
    attempt = Attempt(cell, 1, "/nowhere", Settings())
    outcome = Outcome(attempt, Status.OK, "", "", {}, {"tokens": 16}, steps, 1.7e9, 2.5)
    with open_for_writing(run) as writer:
        writer.append(outcome, None)
    (row,) = derive_cells(run.read("attempts"), run.read("samples")).to_dict("records")
    assert row["tokens_per_s"] == 16_000
    found = row["tokens_per_s_per_gpu"]
    assert (None if pd.isna(found) else found) == per_gpu
