"""Tables of allocations, from rows written by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from orchestrator.analysis.results import Results, load_results
from orchestrator.report.charts.memory_timeline import live_memory
from orchestrator.report.charts.registry import PLOTS, drawn_figures
from orchestrator.report.tables.registry import lay_out
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status
from tasks.spec.tables import WHOLE_STEP, AllocationRow, LiveRow, Sample
from tests.conftest import with_samples
from tests.support.tables import texts_of

MakeOutcome = Callable[..., Outcome]
GIB, MIB = 1024**3, 1024**2
BY_PART = "allocations-by-part"


def alike(
    role: str, part: str, size_mib: int, count: int, made_in: str = "", chain: str = ""
) -> AllocationRow:
    size = size_mib * MIB
    return AllocationRow(
        "peak", "backward", role, part, "part", made_in, chain, size, count, size * count
    )


STEP = (
    alike("activations", "softmax", 64, 8, "forward", "model/attention.py:32 softmax"),
    alike("activations", "ffn", 32, 4, "forward", "model/layers.py:113 forward"),
    alike("activations", "rope", 1, 3, "forward"),
    alike("activations", "norm", 1, 1, "forward"),
    alike("parameters", "ffn", 100, 2),
    alike("parameters", "head", 56, 1),
    alike("temporary", "loss", 90, 1, "backward"),
    alike("buffers", "", 6, 1),
    alike("unlabelled", "", 4, 1),
    replace(alike("slack", "", 24, 1), count=0),
)
TOTAL_MIB = 512 + 128 + 3 + 1 + 256 + 90 + 6 + 4 + 24


@pytest.fixture
def results_of(tmp_path: Path, make_outcome: MakeOutcome) -> Callable[..., Results]:
    def load(*outcomes: Outcome, predictions: Mapping[str, list[Sample]] | None = None) -> Results:
        run = Run(tmp_path / "allocations")
        with open_for_writing(run) as writer:
            writer.write_manifest({"name": "allocations"})
            writer.append_predictions(predictions or {})
            for outcome in outcomes:
                writer.append(outcome, None)
        return load_results(run)

    return load


def table(results: Results, name: str) -> list[dict[str, str]]:
    pages = lay_out(results, [name])
    return [dict(zip(page.header, row, strict=True)) for page in pages for row in texts_of(page)]


IN_STEP = tuple(
    replace(
        alike(role, part, size, 1, "forward", "calls"), moment=WHOLE_STEP, count=0, total_bytes=0
    )
    for role, part, size in [("activations", "scores", 128), ("temporary", "scores", 256)]
)


def test_the_largest_allocations_of_parts_are_a_table_and_no_part_of_the_peak(
    results_of: Callable[..., Results], make_outcome: MakeOutcome
) -> None:
    results = results_of(replace(make_outcome(), allocations=(*STEP, *IN_STEP)))
    columns = ("part", "role", "MiB", "made in", "call chain")
    assert [tuple(row[name] for name in columns) for row in table(results, BY_PART)] == [
        ("scores", "temporary", "256.00", "forward", "calls"),
        ("scores", "activations", "128.00", "forward", "calls"),
    ]
    without = results_of(replace(make_outcome(number=2), allocations=STEP))
    for name in ("composition", "allocations"):
        assert "scores" not in {row["part"] for row in table(results, name)}
        assert table(results, name) == table(without, name)[: len(table(results, name))]


def test_the_composition_adds_up(
    results_of: Callable[..., Results], make_outcome: MakeOutcome
) -> None:
    rows = table(results_of(replace(make_outcome(), allocations=STEP)), "composition")
    assert [(row["role"], row["part"], row["GiB"], row["allocations"]) for row in rows] == [
        ("parameters", "–", "0.250", "3"),
        ("buffers", "–", "0.006", "1"),
        ("activations", "softmax", "0.500", "8"),
        ("activations", "ffn", "0.125", "4"),
        ("activations", "other parts", "0.004", "4"),
        ("temporary", "loss", "0.088", "1"),
        ("slack", "–", "0.023", "–"),
        ("unlabelled", "–", "0.004", "1"),
        ("in all", "–", "1.000", "22"),
    ]
    assert rows[0]["moment"] == "peak, backward"
    assert rows[2]["share"] == f"{512 / TOTAL_MIB:.1%}" == "50.0%"
    assert rows[-1]["share"] == "100.0%"


def test_each_moment_of_a_cell_has_its_own_composition(
    results_of: Callable[..., Results], make_outcome: MakeOutcome
) -> None:
    later = tuple(replace(row, moment="end", phase="optimizer") for row in STEP)
    rows = table(results_of(replace(make_outcome(), allocations=STEP + later)), "composition")
    assert [(row["moment"], row["GiB"]) for row in rows if row["role"] == "in all"] == [
        ("peak, backward", "1.000"), ("end, optimizer", "1.000")
    ]  # fmt: skip


def test_the_largest_allocation_of_each_role_is_shown(
    results_of: Callable[..., Results], make_outcome: MakeOutcome
) -> None:
    many = tuple(alike("activations", f"part {n}", 60, 9, "forward") for n in range(10))
    rows = table(results_of(replace(make_outcome(), allocations=STEP + many)), "allocations")
    assert [row["part"] for row in rows[:10]] == [f"part {n}" for n in range(10)]
    assert [
        (row["role"], row["MiB each"], row["allocations"], row["part"], row["made in"])
        for row in rows[10:]
    ] == [
        ("activations", "64.00", "8", "softmax", "forward"),
        ("parameters", "100.00", "2", "ffn", "before"),
        ("temporary", "90.00", "1", "loss", "backward"),
        ("slack", "–", "–", "–", "–"),
        ("buffers", "6.00", "1", "–", "before"),
        ("unlabelled", "4.00", "1", "–", "before"),
    ]
    assert rows[10]["call chain"] == "model/attention.py:32 softmax"


def test_the_table_of_allocations_has_the_ten_largest(
    results_of: Callable[..., Results], make_outcome: MakeOutcome
) -> None:
    many = tuple(
        alike("activations", f"part {place}", 1, place + 1, "forward") for place in range(20)
    )
    rows = table(results_of(replace(make_outcome(), allocations=many)), "allocations")
    assert [row["allocations"] for row in rows] == [str(count) for count in range(20, 10, -1)]
    assert (rows[0]["MiB each"], rows[0]["share"]) == ("1.00", f"{20 / 210:.1%}")
    assert (rows[0]["role"], rows[0]["part"]) == ("activations", "part 19")


def test_predicted_and_measured_bytes_of_each_role(
    results_of: Callable[..., Results], make_outcome: MakeOutcome
) -> None:
    outcome = replace(make_outcome(), allocations=STEP)
    roles = {
        "parameters": 256,
        "activations: ffn": 100,
        "activations: attention squares": 500,
        "inputs": 6,
        "workspace": 32,
    }
    predicted = [Sample("prediction", "at_peak_bytes", "bytes", mib * MIB, "steady", "backward", note=role)
                 for role, mib in roles.items()]  # fmt: skip
    predicted.append(
        Sample(
            "prediction", "peak_allocated_bytes", "bytes", GIB, "steady", "backward", note="tracked"
        )
    )
    results = results_of(outcome, predictions={outcome.attempt.cell.id: predicted})
    rows = {row["source"]: row for row in table(results, "memory-parts")}
    expected = {
        "parameters": ("0.25", "0.25"),
        "inputs": ("0.01", "–"),
        "activations": ("0.10", "0.63"),
        "attention squares": ("0.49", "–"),
        "temporary": ("–", "0.09"),
        "workspace": ("0.03", "–"),
        "slack": ("–", "0.02"),
        "unlabelled": ("–", "0.00"),
    }
    for role, sizes in expected.items():
        assert (rows["predicted"][role], rows["measured"][role]) == sizes, role


def test_a_cell_that_ran_out_of_memory_has_a_composition(
    results_of: Callable[..., Results], make_outcome: MakeOutcome
) -> None:
    filled = tuple(replace(row, moment="out of memory", phase="forward") for row in STEP)
    oom = replace(make_outcome(Status.OOM, context_length=64), allocations=filled)
    results = results_of(replace(make_outcome(), allocations=STEP), oom)
    rows = table(results, "composition")
    assert {(row["context_length"], row["moment"]) for row in rows} == {
        ("16", "peak, backward"),
        ("64", "out of memory, forward"),
    }


@pytest.fixture
def only_memory_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no other chart."""
    (plot,) = [plot for plot in PLOTS if plot.name == "memory-timeline"]
    monkeypatch.setattr("orchestrator.report.charts.registry.PLOTS", (plot,))


@pytest.mark.usefixtures("only_memory_timeline")
def test_without_snapshots_there_are_no_tables_of_allocations(
    results_of: Callable[..., Results], make_outcome: MakeOutcome
) -> None:
    results = results_of(make_outcome())
    for name in ("composition", "allocations", "memory-parts", "coverage"):
        assert table(results, name) == []
    assert drawn_figures(results) == []


def test_coverage_of_a_memory_snapshot(
    results_of: Callable[..., Results], make_outcome: MakeOutcome
) -> None:
    outcome = make_outcome()
    numbers = {"peak_allocated_bytes": 4 * GIB, "peak_requested_bytes": 2 * GIB, "peak_reserved_bytes": 5 * GIB,
               "replayed_peak_bytes": 2 * GIB, "unlabelled_bytes": GIB, "events": 200_000, "wrapped": 1.0}  # fmt: skip
    samples = tuple(
        Sample("memory_snapshot", metric, "", value) for metric, value in numbers.items()
    )
    results = results_of(with_samples(outcome, *samples))
    (row,) = table(results, "coverage")
    assert (row["allocated"], row["replayed / requested"], row["unlabelled"]) == (
        "4.00",
        "1.0000",
        "25.0%",
    )
    assert (row["events"], row["wrapped"]) == ("200,000", "yes")
    assert "peak_allocated_bytes" not in results.cells  # recording changes the peak of a step


def curve(scale: float) -> tuple[LiveRow, ...]:
    moments = (("", 0.0), ("forward", 0.001), ("forward", 0.001), ("backward", 2.0))
    return tuple(
        LiveRow(event, at_ms, phase, role, round(scale * nbytes * (event + 1)))
        for event, (phase, at_ms) in enumerate(moments)
        for role, nbytes in (("parameters", GIB), ("activations", 2 * GIB))
    )


@pytest.mark.usefixtures("only_memory_timeline")
def test_live_memory_during_a_step_is_a_chart(
    results_of: Callable[..., Results], make_outcome: MakeOutcome
) -> None:
    training, forward = (
        replace(make_outcome(), live=curve(1)),
        replace(make_outcome(**{"pass": "forward"}), live=curve(0.5)),
    )
    results = results_of(training, forward)
    (figure,) = drawn_figures(results)
    assert figure.picture.problem == ""
    assert figure.picture.png.startswith(b"\x89PNG")
    training_panel, forward_panel = live_memory(results).panels
    assert training_panel["title"].endswith("training step")
    assert forward_panel["title"].endswith("forward pass")
    rows = pd.DataFrame(training_panel["layer"][0]["data"]["values"])
    activations = rows[rows["role"] == "activations"]
    # Of two samples at one time, the higher one.
    assert activations["at"].tolist() == [0.0, 0.001, 2.0]
    assert activations["gib"].tolist() == [2.0, 6.0, 8.0]
    begins = pd.DataFrame(training_panel["data"]["values"])
    assert begins.set_index("phase")["at"]["backward"] == 2.0
    for phase in ("forward", "backward"):
        assert f">{phase}</text>" in figure.picture.svg


def test_frames_hold_the_latest_attempt_alone(
    results_of: Callable[..., Results], make_outcome: MakeOutcome, tmp_path: Path
) -> None:
    import orchestrator

    results_of(
        replace(make_outcome(), allocations=STEP[:1], live=curve(1)),
        replace(make_outcome(number=2), allocations=STEP, live=()),
    )
    run = orchestrator.load(tmp_path / "allocations")
    assert len(run.allocations) == len(STEP)
    assert run.allocations.groupby("role")["total_bytes"].sum().to_dict()["parameters"] == 256 * MIB
    assert run.live.empty
    columns: list[Any] = ["event", "at_ms", "phase", "role", "live_bytes"]
    assert set(columns) < set(run.live.columns)
