"""The instrument on real steps of a small model, on a host that passes for a GPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.attention import AttentionParams
from tasks.attention import build as build_attention
from tasks.harness.backward_parts import PartTracker
from tasks.harness.model_parts import parts_named
from tasks.harness.stage import Session
from tasks.instruments import memory_snapshot as instrument
from tasks.process.phase_file import Progress
from tasks.spec.tables import WHOLE_STEP, Sample
from tasks.train_step import build
from tasks.training.parameters import TrainStepParams
from tests.support.allocator import RecordedAllocator, RecordedDevice, see_all

TINY: dict[str, Any] = {"device": "cpu", "size": "tiny", "context_length": 32, "batch_size": 2}


class Watched:
    def __init__(self, session: Session, samples: list[Sample]) -> None:
        rows, self.live = session.allocations, session.live
        self.rows = [row for row in rows if row.moment == "peak"]
        self.largest = [row for row in rows if row.moment == WHOLE_STEP]
        self.samples = {sample.metric: sample for sample in samples}
        self.workload = session.workload

    def bytes_of(self, role: str, part: str | None = None) -> int:
        return sum(
            row.total_bytes for row in self.rows if row.role == role and part in (None, row.part)
        )

    def value(self, metric: str) -> float:
        value = self.samples[metric].value
        assert value is not None
        return value


@pytest.fixture
def session_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A session on a recorded device, and its allocator."""

    def make(
        folder: Path | None = None,
        most_events: int = 10**9,
        attention: AttentionParams | None = None,
        **params: Any,
    ) -> tuple[Session, RecordedAllocator]:
        allocator = RecordedAllocator(most_events)
        monkeypatch.setattr(instrument, "memory", allocator.memory)
        monkeypatch.setattr(instrument, "record_function", allocator.phase_range)
        monkeypatch.setattr(instrument, "_workspaces", lambda snapshot: [])
        values = attention or TrainStepParams.model_validate({**TINY, **params})
        workload = build_attention(values) if isinstance(values, AttentionParams) else build(values)
        see_all(allocator, workload.resident)
        workload = replace(workload, device=RecordedDevice(allocator))
        return Session(workload, values, Progress(), folder=folder), allocator

    return make


@pytest.fixture
def watch(session_of: Any) -> Any:
    def take(**how: Any) -> Watched:
        session, allocator = session_of(**how)
        with allocator:
            samples = list(instrument.take_snapshot(session))
        return Watched(session, samples)

    return take


def parameters(watched: Watched) -> dict[str, torch.nn.Parameter]:
    assert watched.workload.model is not None
    return dict(watched.workload.model.named_parameters())


@pytest.mark.compile
@pytest.mark.parametrize("optimizer", ["course", "foreach"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_composition_of_a_training_step(watch: Any, precision: str, optimizer: str) -> None:
    step = watch(precision=precision, optimizer=optimizer)
    nbytes = sum(parameter.nbytes for parameter in parameters(step).values())
    assert (
        sum(row.total_bytes for row in step.rows)
        == step.value("peak_allocated_bytes")
        == step.value("replayed_peak_bytes")
    )
    assert step.bytes_of("parameters") == nbytes
    assert step.bytes_of("optimizer state") >= 2 * nbytes
    assert step.bytes_of("slack") == 0
    assert step.bytes_of("unlabelled") == 0
    copied = sum(
        p.nbytes // 2
        for name, p in parameters(step).items()
        if p.ndim == 2 and "embeddings" not in name
    )
    assert step.bytes_of("autocast weight copies") in (
        (0,) if precision == "fp32" else (0, copied)
    )  # none in the optimizer


def test_copies_of_weights_are_found_also_where_results_are_as_large(watch: Any) -> None:
    """With as many tokens as the model is wide, inputs, weights and results of a projection have one size."""
    dims = {"size": None, "d_model": 64, "d_ff": 256, "num_layers": 2, "num_heads": 4}
    for way in ("forward", "forward_backward"):
        step = watch(
            **dims,
            precision="bf16",
            context_length=32,
            batch_size=2,
            vocab_size=1000,
            **{"pass": way},
        )
        expected = Counter[str]()
        for name, parameter in parameters(step).items():
            if parameter.ndim == 2 and "embeddings" not in name:
                label = (
                    "ffn"
                    if "ffn" in name
                    else name.split(".")[-2].replace("_proj", " projection").replace("output", "o")
                )
                expected[label.replace("lm_head", "head")] += parameter.nbytes // 2
        found = {row.part: step.bytes_of("autocast weight copies", row.part) for row in step.rows
                 if row.role == "autocast weight copies"}  # fmt: skip
        assert found == expected


def test_activations_are_what_the_forward_pass_keeps(watch: Any) -> None:
    step = watch(**{"pass": "forward_grad"}, context_length=64)
    square = 2 * 2 * 64 * 64 * 4
    assert step.bytes_of("activations", "softmax") >= 2 * 2 * square
    assert {row.part for row in step.rows if row.role == "activations"} >= {
        "softmax",
        "ffn",
        "norm",
        "rope",
        "residual",
        "loss",
    }
    assert {row.allocated_in for row in step.rows if row.role == "activations"} == {"forward"}


def test_inference_keeps_nothing(watch: Any) -> None:
    step = watch(**{"pass": "forward"})
    assert (
        step.bytes_of("activations")
        == step.bytes_of("gradients")
        == step.bytes_of("optimizer state")
        == 0
    )
    assert step.bytes_of("temporary", "head") > 0


def test_temporaries_of_the_backward_pass_have_the_part_that_they_are_the_derivative_of(
    watch: Any,
) -> None:
    step = watch(**{"pass": "forward_backward"}, context_length=128)
    assert {row.phase for row in step.rows} == {"backward"}
    made = [
        row
        for row in step.rows
        if (row.allocated_in, row.role) == ("backward", "temporary") and row.size_bytes > 1000
    ]
    assert {(row.part, row.attributed_by) for row in made} == {("loss", "part")}


def test_attention_alone(watch: Any) -> None:
    """What computes its parts anew in the backward pass names them there, and goes on with its own name."""
    step = watch(
        attention=AttentionParams(
            device="cpu", context_length=64, d_head=8, batch_size=2, attention="recompute"
        )
    )
    assert step.bytes_of("unlabelled") == 0
    assert (
        step.bytes_of("inputs") == 4 * 2 * 64 * 8 * 4
    )  # query, key, value, and the gradient that it starts from
    assert {
        row.part for row in step.rows if row.allocated_in == "backward" and row.role == "temporary"
    } == {
        "scores",
        "attention output",
    }


def test_watching_changes_nothing_and_leaves_nothing_behind(session_of: Any) -> None:
    session, allocator = session_of(precision="bf16")
    with allocator:
        session.step()
        session.workload.device.reset_peaks()
        session.step()
        plain_bytes = allocator.peak_bytes
        samples = {sample.metric: sample.value for sample in instrument.take_snapshot(session)}
    assert samples["peak_allocated_bytes"] == plain_bytes
    assert not any(
        module._forward_hooks or module._forward_pre_hooks
        for module in session.workload.model.modules()
    )


def test_the_curve_reaches_the_peak_and_is_short(watch: Any) -> None:
    step = watch()
    live: Counter[int] = Counter()
    for row in step.live:
        live[row.event] += row.live_bytes
    assert max(live.values()) == step.value("replayed_peak_bytes")
    assert len(live) <= 250
    phases = list(dict.fromkeys(row.phase for row in step.live))
    assert [phase for phase in phases if phase] == ["forward", "backward", "optimizer"]


def test_a_hidden_tensor_is_unlabelled(session_of: Any) -> None:
    session, allocator = session_of()
    session.workload.model.hidden = torch.empty(12_345, dtype=torch.uint8)
    allocator.see(session.workload.model.hidden)
    with allocator:
        samples = {sample.metric: sample.value for sample in instrument.take_snapshot(session)}
    assert samples["unlabelled_bytes"] == 12_345
    row, in_step = (row for row in session.allocations if row.role == "unlabelled")
    assert (row.size_bytes, row.count, row.attributed_by, row.allocated_in) == (
        12_345,
        1,
        "none",
        "",
    )
    assert (in_step.moment, in_step.size_bytes, in_step.total_bytes) == (WHOLE_STEP, 12_345, 0)


def test_the_largest_allocation_of_a_part_is_that_of_the_step_not_of_its_peak(watch: Any) -> None:
    step = watch(context_length=64)
    sizes = {(row.role, row.part): row.size_bytes for row in step.largest}
    assert len(sizes) == len(step.largest)
    assert all(row.count == row.total_bytes == 0 for row in step.largest)
    batch, heads, itemsize = 2, 2, 4
    for part in ("scores", "softmax"):
        square = max(size for (_, own), size in sizes.items() if own == part)
        assert square == batch * heads * 64**2 * itemsize
    at_peak = [row for row in step.rows if row.role != "slack"]
    assert all(sizes[row.role, row.part] >= row.size_bytes for row in at_peak)
    # Activations are gone at the peak, which is in the optimizer.
    assert {row.phase for row in at_peak} == {"optimizer"}
    gone = sizes.keys() - {(row.role, row.part) for row in at_peak}
    assert ("activations", "softmax") in gone


def test_a_record_that_is_too_short_says_so(watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instrument, "_MOST_ENTRIES", 100)
    short = watch(most_events=100)
    assert (short.value("events"), short.value("wrapped")) == (100, 1.0)
    assert "only the last 100 events" in short.samples["wrapped"].note
    monkeypatch.undo()


def test_the_snapshot_is_a_file_that_a_person_finds(watch: Any, tmp_path: Path) -> None:
    step = watch(folder=tmp_path)
    (kept,) = tmp_path.iterdir()
    assert kept.name == "snapshot_device-cpu_size-tiny_context_length-32_batch_size-2.pickle"
    assert kept.stat().st_size == step.value("file_bytes")


def test_a_snapshot_that_is_too_large_is_dropped_with_a_note(
    watch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instrument, "_LARGEST_SNAPSHOT_BYTES", 1000)
    step = watch(folder=tmp_path)
    assert step.samples["file_bytes"].value is None
    assert "more than 1000" in step.samples["file_bytes"].note
    assert not list(tmp_path.iterdir())
    assert step.rows


def test_a_memory_snapshot_without_cuda_is_null_with_a_note() -> None:
    params = TrainStepParams.model_validate(TINY)
    session = Session(build(params), params, Progress())
    (sample,) = (sample for stage in instrument.STAGES for sample in stage.run(session))
    assert (sample.value, sample.note) == (
        None,
        "only CUDA's allocator can record a snapshot: device cpu cannot",
    )
    assert session.on_error == []


def out_of_memory(session: Session, on_record: bool, allocator: RecordedAllocator) -> None:
    """Ends the forward pass before its last norm, after the allocator has told its observer."""
    witness = instrument.OutOfMemoryWitness(session)

    def give_up(x: torch.Tensor) -> torch.Tensor:
        witness.see(0, 2**40, 2**30, 2**20)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1024.00 GiB")

    session.workload.model.ln_final.forward = give_up
    with allocator, pytest.raises(torch.OutOfMemoryError) as raised:
        list(instrument.take_snapshot(session)) if on_record else session.step()
    witness.testify(raised.value)


@pytest.mark.parametrize("on_record", [True, False])
def test_what_filled_the_memory_is_kept(session_of: Any, tmp_path: Path, on_record: bool) -> None:
    session, allocator = session_of(folder=tmp_path)
    out_of_memory(session, on_record, allocator)
    (kept,) = tmp_path.iterdir()
    assert session.evidence == {"snapshot": kept.name}
    assert kept.name.startswith("snapshot_oom_")
    by_role: Counter[str] = Counter()
    for row in session.allocations:
        assert (row.moment, row.phase) == ("out of memory", "forward")
        by_role[row.role] += row.total_bytes
    assert by_role["parameters"] == sum(
        parameter.nbytes for parameter in session.workload.model.parameters()
    )
    made = {row.part for row in session.allocations if row.role == "activations"}
    assert made >= {"ffn", "softmax", "norm"} if on_record else not made
    assert (by_role["unlabelled"] > 0) is not on_record


def test_a_snapshot_that_cannot_be_saved_does_not_hide_an_out_of_memory_error(
    session_of: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    session, _ = session_of(folder=tmp_path / "missing")
    witness = instrument.OutOfMemoryWitness(session)
    witness.see(0, 1, 1, 1)
    witness.testify(ValueError("another error"))
    assert session.evidence == {}
    witness.testify(torch.OutOfMemoryError("CUDA out of memory"))
    assert session.evidence["snapshot"].startswith("not saved: [Errno 2]")
    monkeypatch.setattr(instrument.memory, "_snapshot", lambda: 1 / 0)
    instrument.OutOfMemoryWitness(session).see(0, 1, 1, 1)
    assert session.evidence["snapshot"] == "not taken: division by zero"


def test_parts_of_the_backward_pass_are_those_of_the_forward_pass() -> None:
    params = TrainStepParams.model_validate(TINY)
    workload, said = build(params), list[str]()
    tracker, session_step = PartTracker(said.append), Session(workload, params, Progress()).step
    backward = torch.autograd.backward
    with parts_named(workload.model, tracker.name), tracker.backward_named():
        session_step()
    assert torch.autograd.backward is backward
    after = said[
        len(said) - 1 - said[::-1].index("loss") :
    ]  # the last of the loss, then all that comes behind it
    order = list(dict.fromkeys(part for part in after if part))
    assert order[:4] == ["loss", "lm_head", "ln_final", "layers.1"]
    assert order[-1] == "token_embeddings"
    assert set(order) >= {
        "scores",
        "softmax",
        "attention output",
        "layers.0.attn.rope",
        "layers.0.ffn.w2",
    }
