"""Tables of kernels, from rows written by hand: each number can be calculated on paper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.analysis.results import Results, choose_cells, load_results
from orchestrator.common.errors import RunError
from orchestrator.report.tables.kernel_tables import KERNEL_TABLES
from orchestrator.report.tables.registry import lay_out
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from tasks.spec.outcome import Outcome
from tasks.spec.tables import KernelRow, Sample
from tests.support.tables import texts_of

MakeOutcome = Callable[..., Outcome]
STEPS = 2


def kernel(
    name: str, phase: str, module: str, kind: str, durations_us: tuple[float, ...]
) -> KernelRow:
    ordered = sorted(1000 * us for us in durations_us)
    count, total = len(ordered), sum(ordered)
    spread = (
        (sum((ns - total / count) ** 2 for ns in ordered) / (count - 1)) ** 0.5
        if count > 1
        else None
    )
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    return KernelRow(
        phase, module, kind, "scope", "aten::x", name, STEPS, count, int(total), total / count, middle, int(ordered[0]),
        int(ordered[-1]), spread,
    )  # fmt: skip


TRAINING = (
    kernel("gemm_a", "forward", "ffn", "GEMM", (100, 100, 300, 300)),
    kernel("gemm_a", "forward", "scores", "GEMM", (50, 50)),
    kernel("gemm_b", "forward", "attention output", "GEMM", (50, 50)),
    kernel("exp_kernel", "forward", "softmax", "elementwise", (200, 200)),
    kernel("max_kernel", "forward", "softmax", "reduction", (100, 100)),
    kernel("gemm_a", "backward", "ffn", "GEMM", (400, 400)),
    kernel("add_kernel", "backward", "", "elementwise", (400, 400)),
    kernel("adam", "optimizer", "optimizer", "optimizer", (150, 150)),
    kernel("unknown", "", "", "other", (10, 10)),
    kernel("outside operators", "forward", "", "other", (9999,)),
)
FORWARD = (
    kernel("gemm_a", "forward", "ffn", "GEMM", (400, 400)),
    kernel("exp_kernel", "forward", "softmax", "elementwise", (100, 100)),
)
COMPILED = (
    kernel("gemm_a", "forward", "ffn", "GEMM", (400, 400)),
    kernel("triton_red_fused__softmax_exp", "forward", "", "softmax", (50, 50)),
)


@pytest.fixture
def results_of(tmp_path: Path, make_outcome: MakeOutcome) -> Callable[..., Results]:
    def load(*cells: tuple[tuple[KernelRow, ...], Mapping[str, Any]]) -> Results:
        run = Run(tmp_path / "kernels")
        with open_for_writing(run) as writer:
            writer.write_manifest({"name": "kernels"})
            for rows, params in cells:
                outcome = make_outcome(**params)
                seen = Sample("kernels", "attributed_to_phase", "ratio", 0.5)
                facts = {**outcome.facts, "softmax_flops": 50, "attention_matmul_flops": 400}
                writer.append(
                    replace(outcome, kernels=rows, samples=(*outcome.samples, seen), facts=facts),
                    None,
                )
        return load_results(run)

    return load


def table(results: Results, name: str) -> list[dict[str, str]]:
    pages = lay_out(results, [name])
    return [dict(zip(page.header, row, strict=True)) for page in pages for row in texts_of(page)]


def test_top_kernels_by_phase(results_of: Callable[..., Results]) -> None:
    rows = table(results_of((TRAINING, {})), "kernels")
    first = rows[0]
    assert (first["phase"], first["name"], first["modules"], first["class"]) == (
        "forward",
        "gemm_a",
        "ffn, scores",
        "GEMM",
    )
    assert (first["time"], first["total ms"], first["instances"]) == ("56.3%", "0.450", "3")
    assert (first["avg µs"], first["min µs"], first["max µs"]) == ("150.0", "50.0", "300.0")
    assert first["sd µs"] == "118.3"  # of 100, 100, 300, 300, 50, 50
    assert first["med µs"] == "≈200.0"
    second = rows[1]
    assert (second["name"], second["med µs"], second["time"]) == ("exp_kernel", "200.0", "25.0%")
    counts = Counter(row["phase"] for row in rows)
    assert counts == {
        "forward": 4, "backward": 2, "optimizer": 1, "outside": 1, "forward + backward": 5, "step": 7,
    }  # fmt: skip
    (outside,) = [row for row in rows if row["phase"] == "outside"]
    assert outside["modules"] == "not attributed"
    both = [row for row in rows if row["phase"] == "forward + backward"]
    by_phase = [row for row in rows if row["phase"] in ("forward", "backward")]
    for total in both:
        parts = [float(row["total ms"]) for row in by_phase if row["name"] == total["name"]]
        assert float(total["total ms"]) == pytest.approx(sum(parts))
    assert "outside operators" not in {row["name"] for row in rows}


def test_the_top_kernel_that_is_no_matrix_product_is_shown(
    results_of: Callable[..., Results],
) -> None:
    products = [kernel(f"gemm_{n}", "forward", "ffn", "GEMM", (500, 500)) for n in range(9)]
    rows = table(results_of(((*TRAINING, *products), {})), "kernels")
    shown = [(row["name"], row["class"]) for row in rows if row["phase"] == "forward"]
    assert len(shown) == 9
    assert {kind for _, kind in shown[:8]} == {"GEMM"}
    assert shown[8] == ("exp_kernel", "elementwise")


def test_share_of_matrix_products_in_inference_and_training(
    results_of: Callable[..., Results],
) -> None:
    rows = table(results_of((TRAINING, {}), (FORWARD, {"pass": "forward"})), "kernel-classes")
    shares = {(row["pass"], row["phase"]): row["GEMM share"] for row in rows}
    assert shares == {
        ("forward", "forward"): "80.0%",
        ("train_step", "forward"): "62.5%",
        ("train_step", "backward"): "50.0%",
        ("train_step", "optimizer"): "–",
        ("train_step", "outside"): "–",
        ("train_step", "forward + backward"): f"{(500 + 400) / 1600:.1%}",
        ("train_step", "step"): f"≥ {(500 + 400) / 1760:.1%}",  # one kernel has no known class
    }


def softmax_and_matmul(row: dict[str, str]) -> list[str]:
    return [row[title] for title in ("softmax ms", "matmul ms", "softmax / matmul", "in FLOPs")]


def test_softmax_next_to_the_matrix_products_of_attention(
    results_of: Callable[..., Results],
) -> None:
    rows = {row["phase"]: row for row in table(results_of((TRAINING, {})), "kernel-classes")}
    assert softmax_and_matmul(rows["forward"]) == ["0.300", "0.100", "3.00", "0.125"]
    assert softmax_and_matmul(rows["backward"]) == ["–"] * 4


def test_a_softmax_that_is_fused_with_another_part_has_no_time(
    results_of: Callable[..., Results],
) -> None:
    fused = kernel(
        "triton_per_fused__softmax_mul", "forward", "scores+softmax", "softmax", (80, 80)
    )
    rows = table(
        results_of((TRAINING, {}), ((*TRAINING, fused), {"compile": "blocks"})), "kernel-classes"
    )
    forward = {row["compile"]: row for row in rows if row["phase"] == "forward"}
    assert softmax_and_matmul(forward["eager"]) == ["0.300", "0.100", "3.00", "0.125"]
    assert softmax_and_matmul(forward["blocks"]) == ["–", "0.100", "–", "–"]


def test_a_kernel_has_the_class_that_its_name_has_today(results_of: Callable[..., Results]) -> None:
    cast = kernel(
        "bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)", "forward", "", "elementwise", (70, 70)
    )
    ours = kernel("a_kernel_that_nobody_knows", "forward", "", "reduction", (30, 30))
    kernels = results_of(((cast, ours), {})).kernels()
    assert kernels.set_index("name")["kernel_class"].to_dict() == {
        cast.name: "copy",
        ours.name: "reduction",
    }


def test_share_of_each_class_in_a_phase(results_of: Callable[..., Results]) -> None:
    rows = table(results_of((TRAINING, {})), "kernel-classes")
    assert rows[0]["kernel ms"] == "0.800"
    assert [rows[0][f"{name} share"] for name in ("GEMM", "elementwise", "reduction")] == [
        "62.5%",
        "25.0%",
        "12.5%",
    ]
    assert rows[2]["optimizer share"] == "100.0%"


def test_kernel_time_by_module_and_phase(results_of: Callable[..., Results]) -> None:
    rows = {row["module"]: row for row in table(results_of((TRAINING, {})), "kernel-modules")}
    assert (rows["ffn"]["forward ms"], rows["ffn"]["backward ms"], rows["ffn"]["optimizer ms"]) == (
        "0.400",
        "0.400",
        "–",
    )
    assert rows["not attributed"]["backward ms"] == "0.400"
    assert rows["not attributed"]["outside ms"] == "0.010"
    assert rows["ffn"]["share"] == f"{800 / 1760:.1%}"


def test_kernels_by_class_eager_and_compiled(results_of: Callable[..., Results]) -> None:
    forward = {"pass": "forward"}
    results = results_of((FORWARD, forward), (COMPILED, {**forward, "compile": "blocks"}))
    rows = {row["compile"]: row for row in table(results, "kernel-classes")}
    eager, compiled = rows["eager"], rows["blocks"]
    assert (eager["kernels of elementwise"], eager["ms of elementwise"]) == ("1", "0.100")
    assert compiled["kernels of elementwise"] == "–"
    assert (eager["kernels of softmax"], compiled["ms of softmax"]) == ("–", "0.050")


def test_kernels_in_which_two_cells_differ(results_of: Callable[..., Results]) -> None:
    cells = (
        (FORWARD, {"pass": "forward"}),
        (COMPILED, {"pass": "forward", "compile": "blocks"}),
        (TRAINING, {"seed": 3}),
    )
    results = results_of(*cells)
    rows = table(results, "kernel-diff")
    assert [(row["name"], row["compile=eager ms"], row["compile=blocks ms"], row["more ms"]) for row in rows[:2]] == [
        ("exp_kernel", "0.100", "0.000", "-0.100"), ("triton_red_fused__softmax_exp", "0.000", "0.050", "+0.050"),
    ]  # fmt: skip
    chosen = choose_cells(
        results, list(results.cells.loc[results.cells["compile"] == "eager", "cell"])
    )
    assert {"train_step", "forward"} == set(chosen.cells["pass"])
    assert any("pass=train_step" in title for title in table(chosen, "kernel-diff")[0])


def test_cells_are_chosen_by_the_beginning_of_their_ids(results_of: Callable[..., Results]) -> None:
    results = results_of((TRAINING, {}), (FORWARD, {"pass": "forward"}))
    cell = results.cells["cell"].iloc[0]
    assert list(choose_cells(results, [cell[:6]]).cells["cell"]) == [cell]
    with pytest.raises(RunError, match="no cell zzz"):
        choose_cells(results, ["zzz"])


def test_a_run_without_kernels_does_not_read_them(
    results_of: Callable[..., Results], make_outcome: MakeOutcome, tmp_path: Path
) -> None:
    run = Run(tmp_path / "plain")
    with open_for_writing(run) as writer:
        writer.write_manifest({"name": "plain"})
        writer.append(make_outcome(), None)

    def without_kernels(table: str) -> Any:
        assert table != "kernels", "the table of kernels was read"
        return run.read(table)

    results = replace(load_results(run), read_table=without_kernels)
    assert not {page.table.name for page in lay_out(results)} & {one.name for one in KERNEL_TABLES}


def test_the_profiler_costs_a_phase_what_it_adds_to_its_timed_duration(
    results_of: Callable[..., Results],
) -> None:
    results = results_of((FORWARD, {}))
    cells = results.cells.assign(
        forward_kernel_time_ms=30.0, forward_busy=0.5, forward_ms_median=40.0, backward_busy=0.5
    )
    (row,) = table(replace(results, cells=cells), "coverage")
    assert (row["profiled forward ms"], row["cost of forward"]) == ("60.0", "1.50")
    # A phase that was not profiled, or not timed, costs nothing that is known.
    assert not {"profiled backward ms", "cost of backward"} & row.keys()
