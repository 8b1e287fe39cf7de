"""The instrument on a real step of a small model, on the CPU."""

from __future__ import annotations

import cProfile
import gzip
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from model.attention import IMPLEMENTATIONS
from tasks.attention import AttentionParams
from tasks.attention import build as build_attention
from tasks.harness.compilation import recorded_provenance
from tasks.harness.device import CpuDevice
from tasks.harness.model_parts import part_functions, parts_named
from tasks.harness.stage import Session
from tasks.instruments import kernels as instrument
from tasks.instruments import stages_of
from tasks.process.phase_file import Progress
from tasks.spec.tables import OUTSIDE_OPERATORS, KernelRow, Sample
from tasks.traces.attribution import attribute
from tasks.traces.chrome import from_json
from tasks.traces.provenance import read_graph
from tasks.traces.summary import to_rows
from tasks.train_step import build
from tasks.training.parameters import TrainStepParams

# One worker makes what these tests share.
pytestmark = pytest.mark.xdist_group("kernels")

SMALL: dict[str, Any] = {"device": "cpu", "size": "tiny", "context_length": 32, "batch_size": 2}
PROJECTIONS = ("q projection", "k projection", "v projection")
Watched = tuple[list[KernelRow], dict[tuple[str, str], float | None], Session]


def watch(folder: Path | None = None, **params: Any) -> Watched:
    values = TrainStepParams.model_validate({**SMALL, **params})
    return watch_session(Session(build(values), values, Progress(), folder=folder))


def watch_session(session: Session) -> Watched:
    samples: list[Sample] = [
        sample for stage in stages_of(["kernels"]) for sample in stage.run(session)
    ]
    return session.kernels, {(s.metric, s.phase): s.value for s in samples}, session


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    return watch(tmp_path_factory.mktemp("artifacts"))


def test_query_key_and_value_projections_run_the_same_kernels(step: Watched) -> None:
    def work(module: str) -> set[tuple[str, str, int]]:
        return {
            (row.phase, row.name, row.count)
            for row in step[0]
            if row.module == module and row.kernel_class == "GEMM"
        }

    query, key, value = map(work, PROJECTIONS)
    assert query == key == value
    assert {(phase, count) for phase, name, count in query if name == "aten::mm"} == {
        ("forward", 2),
        ("backward", 4),
    }


def test_every_part_of_the_model_shows_in_both_passes(step: Watched) -> None:
    parts = {"scores", "softmax", "attention output", *PROJECTIONS, "o projection", "ffn", "norm", "rope", "embedding", "head",
             "loss", "residual", "attention"}  # fmt: skip
    for phase in ("forward", "backward"):
        assert {row.module for row in step[0] if row.phase == phase} >= parts
    assert {row.module for row in step[0] if row.phase == "optimizer"} == {"optimizer", ""}


def test_kernel_coverage_is_full_for_phases_and_nearly_full_for_modules(step: Watched) -> None:
    rows, numbers, _ = step
    for _attempt in range(2):
        # Another process on the core lengthens single operators, which may be ones of no module.
        if (numbers["attributed_to_module", ""] or 0) <= 0.97:
            rows, numbers, _ = watch()
    assert numbers["attributed_to_phase", ""] == pytest.approx(1.0)
    assert (
        0.97 < (numbers["attributed_to_module", ""] or 0) < 1.0
    )  # what keeps gradients is of no module
    inside = [row for row in rows if row.name != OUTSIDE_OPERATORS]
    with_module = sum(row.total_ns for row in inside if row.module)
    assert with_module / sum(row.total_ns for row in inside) == pytest.approx(
        numbers["attributed_to_module", ""]
    )


def test_matrix_products_have_a_share_of_both_passes_and_none_of_the_optimizer(
    step: Watched,
) -> None:
    shares = {}
    for phase in ("forward", "backward", "optimizer"):
        rows = [row for row in step[0] if row.phase == phase and row.name != OUTSIDE_OPERATORS]
        shares[phase] = sum(row.total_ns for row in rows if row.kernel_class == "GEMM") / sum(
            row.total_ns for row in rows
        )
    assert 0 < shares["forward"] < 1
    assert 0 < shares["backward"] < 1
    assert shares["optimizer"] == 0


def test_operators_and_what_is_outside_of_them_come_to_the_phase(step: Watched) -> None:
    """Held against the trace itself, read without this project's reader."""
    events = json.loads(gzip.decompress(trace_of(step).read_bytes()))["traceEvents"]
    for phase in ("forward", "backward", "optimizer"):
        took_us = sum(event["dur"] for event in events if event.get("name") == f"phase::{phase}")
        rows = [row for row in step[0] if row.phase == phase]
        assert sum(row.total_ns for row in rows) == pytest.approx(took_us * 1e3, rel=1e-3)
        assert len([row for row in rows if row.name == OUTSIDE_OPERATORS]) == 1


def test_the_trace_is_one_file_that_a_person_finds(step: Watched) -> None:
    trace = trace_of(step)
    assert trace.name == "trace_device-cpu_size-tiny_context_length-32_batch_size-2.json.gz"
    assert step[1]["trace_bytes", ""] == trace.stat().st_size
    text = gzip.decompress(trace.read_bytes())
    events = json.loads(text)["traceEvents"]
    assert from_json(text).phase_totals().keys() == {"forward", "backward", "optimizer"}
    assert len([event for event in events if event.get("name") == "phase::backward"]) == 1


@pytest.mark.compile
@pytest.mark.parametrize("name", ['with "quotes"', "back\\slash", "new\nline", "ünï ☃"])
def test_a_folder_of_any_name(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    step = watch(folder)
    assert step[0]
    assert list(folder.iterdir()) == [trace_of(step)]
    assert from_json(gzip.decompress(trace_of(step).read_bytes())).phase_totals()


@pytest.mark.compile
def test_a_trace_that_is_too_large_is_dropped_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instrument, "_LARGEST_TRACE_BYTES", 1000)
    params = TrainStepParams.model_validate(SMALL)
    session = Session(build(params), params, Progress(), folder=tmp_path)
    samples = list(instrument.watch_kernels(session))
    (kept,) = (sample for sample in samples if sample.metric == "trace_bytes")
    assert kept.value is None
    assert "more than 1000" in kept.note
    assert not list(tmp_path.iterdir())
    assert session.kernels


@pytest.mark.compile
def test_by_hand_no_artifact_is_left() -> None:
    rows, numbers, _ = watch()
    assert rows
    assert ("trace_bytes", "") not in numbers


def test_reading_the_trace_costs_little(step: Watched) -> None:
    """The number of calls for an event is limited; a cell on a GPU has some 100,000 events."""
    text = gzip.decompress(trace_of(step).read_bytes())
    events = len(json.loads(text)["traceEvents"])

    profile = cProfile.Profile()
    profile.runcall(lambda: to_rows(attribute(from_json(text)), 2))
    calls = sum(entry.callcount for entry in profile.getstats())
    assert calls / events < 50  # 35 when this was written


@pytest.mark.compile
@pytest.mark.parametrize("attention", ["weights_only", "recompute", "torch_softmax"])
def test_the_parts_of_attention_have_names_also_where_it_is_a_function(attention: str) -> None:
    rows, numbers, _ = watch(attention=attention)
    for phase in ("forward", "backward"):
        assert {row.module for row in rows if row.phase == phase} >= {
            "scores",
            "softmax",
            "attention output",
        }
    assert (numbers["attributed_to_module", ""] or 0) > 0.97


def test_fused_attention_is_one_part() -> None:
    rows, _, _ = watch(attention="flash")
    fused = [
        row for row in rows if row.module == "fused attention" and row.kernel_class == "attention"
    ]
    assert {row.phase for row in fused} == {"forward", "backward"}
    assert not {row.module for row in rows} & {"scores", "softmax", "attention output"}


def test_attention_alone() -> None:
    params = AttentionParams(
        device="cpu", context_length=32, d_head=8, batch_size=2, projections=True
    )
    rows, _, _ = watch_session(Session(build_attention(params), params, Progress()))
    assert {row.module for row in rows} >= {
        "scores",
        "softmax",
        "attention output",
        *PROJECTIONS,
        "o projection",
    }


def test_a_model_of_ones_own_goes_by_the_names_of_its_modules() -> None:
    own = {
        "size": None,
        "model": "torch.nn:Embedding",
        "model_args": {"num_embeddings": 100, "embedding_dim": 100},
    }
    rows, _, _ = watch(**own, context_length=1, batch_size=1, vocab_size=100)
    assert {row.module for row in rows if row.phase == "forward"} == {"model", "loss", ""}


@pytest.mark.compile
def test_watching_changes_nothing_and_leaves_nothing_behind() -> None:
    params = TrainStepParams.model_validate({**SMALL, "pass": "forward_backward"})

    def gradients(watched: bool) -> list[torch.Tensor]:
        workload = build(params)
        session = Session(workload, params, Progress())
        if watched:
            watch_session(session)
        session.step()
        model = workload.model
        assert model is not None
        assert not any(
            module._forward_hooks or module._forward_pre_hooks for module in model.modules()
        )
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    for plain, watched in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(plain, watched)


def test_a_module_that_raises_closes_its_range() -> None:
    entered: list[str] = []

    class Range:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            entered.append(self.name)

        def __exit__(self, *error: object) -> None:
            assert entered.pop() == self.name

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(3, 4))
    with (
        parts_named(model, Range),
        pytest.raises(RuntimeError, match="shapes cannot be multiplied"),
    ):
        model(torch.ones(1, 3))
    assert entered == []
    assert not model._forward_hooks


@pytest.fixture
def restored_provenance_level() -> Iterator[None]:
    """Restore torch's option after the test."""
    # Not by monkeypatch, which in the end deletes an option of torch instead of restoring it.
    trace = torch._inductor.config.trace
    before = trace.provenance_tracking_level
    yield
    trace.provenance_tracking_level = before


@pytest.mark.compile
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile on the CPU needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # torch asks non-leaf tensors for their gradients
@pytest.mark.usefixtures("restored_provenance_level")
def test_compiled_code_is_not_compiled_again_by_being_watched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    params = TrainStepParams.model_validate({**SMALL, "compile": "blocks"})
    session = Session(build(params), params, Progress())
    list(instrument.record_provenance(session))
    session.step()
    graphs = counters["stats"]["unique_graphs"]
    rows, numbers, _ = watch_session(session)
    assert counters["stats"]["unique_graphs"] == graphs
    assert numbers["attributed_to_phase", ""] == pytest.approx(1.0)
    for phase, products in (("forward", 1), ("backward", 2)):
        compiled = {
            row.module: row.count
            for row in rows
            if (row.phase, row.attributed_by, row.kernel_class) == (phase, "provenance", "GEMM")
        }
        expected = dict.fromkeys(
            (*PROJECTIONS, "o projection", "scores", "attention output"), 2 * products
        )
        assert compiled == {**expected, "ffn": 3 * 2 * products}  # two layers
    line = r"return functional.linear(x, self.weight)\n"
    assert any(line in text for text in recorded_provenance())
    for text in recorded_provenance():
        unmarked = re.sub(
            r"\\n[ ~^]*\^[ ~^]*(?=\\n)", "", text
        )  # some versions of torch mark a part of a line, some do not
        for other in (unmarked, unmarked.replace(line, rf"{line}           ~~~~~~^^^^^\n")):
            assert read_graph(other, part_functions()) == read_graph(text, part_functions())
    torch._dynamo.reset()


def test_every_implementation_of_attention_can_be_named() -> None:
    """Each is of parts, or is fused: nothing of it is left to the module around it but reshaping."""
    seen: set[str] = set()

    class Seen:
        def __init__(self, name: str) -> None:
            seen.add(name)

        def __enter__(self) -> None:
            pass

        def __exit__(self, *error: object) -> None:
            pass

    def inputs() -> torch.Tensor:
        return torch.randn(2, 2, 16, 8)

    for name in ("naive", "torch_softmax", "weights_only", "recompute", "sdpa", "math", "flash"):
        seen.clear()
        with parts_named(None, Seen):
            IMPLEMENTATIONS[name](inputs(), inputs(), inputs(), True)
        assert seen in ({"scores", "softmax", "attention output"}, {"fused attention"}), name


@pytest.mark.filterwarnings("ignore")  # torch says that it has no CUDA to profile
def test_a_gpu_whose_kernels_cannot_be_seen_has_no_rows(tmp_path: Path) -> None:
    """In some containers CUPTI is refused: what the host did must not pass for kernels then."""

    class Refused(CpuDevice):
        kind = "cuda"

    params = TrainStepParams.model_validate(SMALL)
    session = Session(replace(build(params), device=Refused()), params, Progress(), folder=tmp_path)
    rows, numbers, _ = watch_session(session)
    assert rows == []
    assert numbers["busy", ""] is None
    assert ("attributed_to_phase", "") not in numbers


def test_nvtx_says_where_it_has_nothing_to_do() -> None:
    params = TrainStepParams.model_validate(SMALL)
    (sample,) = (
        s
        for stage in stages_of(["nvtx"])
        for s in stage.run(Session(build(params), params, Progress()))
    )
    assert sample.value is None
    assert sample.note == "NVTX ranges need CUDA: device cpu has none"


def trace_of(step: Watched) -> Path:
    folder = step[2].folder
    assert folder is not None
    (trace,) = folder.iterdir()
    return trace
