"""Predicted memory against what really allocates: the CPU's allocator, an H200 that was measured, published figures."""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

from model.accounting import parameter_count
from model.config import SIZES, VOCAB_SIZE
from tasks.harness.workload import run_step
from tasks.prediction.allocator import CachingAllocator, cublas_workspace_bytes
from tasks.prediction.closed_form import closed_form
from tasks.prediction.operations.emulation import gpu_emulated
from tasks.prediction.operations.kernels import SCRATCH, SdpaCall, fused_attention
from tasks.prediction.predictor import Predictor, track
from tasks.prediction.records import Prediction, PredictionRequest, Verdict, memory_identity
from tasks.prediction.replay import replay
from tasks.prediction.tracking import StorageTracker
from tasks.process.phase_file import Progress
from tasks.spec.registry import make_cell
from tasks.spec.tables import Sample
from tasks.train_step import build
from tasks.training.parameters import PHASES, TrainStepParams
from tests.conftest import ROOT

GIB = 1024**3
# Every second cell is one of 256 or 1024 tokens: those of the larger sizes take seconds each.
SLOW = [("small", 1), ("medium", 1), ("large", 2), ("xl", 2), ("2.7B", 2)]
HOPPER = cublas_workspace_bytes(9.0)
H200 = json.loads((ROOT / "tests" / "data" / "h200_train_step.json").read_text())
SMALL: dict[str, Any] = {
    "device": "cpu", "d_model": 96, "d_ff": 256, "num_layers": 3, "num_heads": 3, "context_length": 64, "batch_size": 2,
    "vocab_size": 500,
}  # fmt: skip


def params_of(**values: Any) -> TrainStepParams:
    return TrainStepParams.model_validate(values)


class Marks:
    """A watcher that writes each phase of a step into the profile."""

    def __init__(self, step: str) -> None:
        self._step = step

    def enter(self, phase: str) -> None:
        self._mark = record_function(f"{self._step} {phase}")
        self._mark.__enter__()

    def leave(self, phase: str) -> None:
        self._mark.__exit__(None, None, None)


@contextmanager
def without_onednn() -> Iterator[None]:
    """Its products of bf16 take scratch, on some processors, that no GPU takes."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "TF32 acceleration on top of oneDNN"
        )  # which is not asked for
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def measured_peaks(
    params: TrainStepParams, tmp_path: Path, steps: Sequence[str] = ("first", "steady")
) -> dict[str, int]:
    """Return the peaks of the phases of real steps on the CPU, with CUDA's autocast, as its allocator reports them."""
    for _ in range(3):
        # On a busy machine, a trace of torch.profiler may lack memory events.
        if any((peaks := traced_peaks(params, tmp_path, steps)).values()):
            return peaks
    raise RuntimeError("torch.profiler records no allocations")


def traced_peaks(params: TrainStepParams, tmp_path: Path, steps: Sequence[str]) -> dict[str, int]:
    rules = gpu_emulated(lambda role: nullcontext(), "cpu")
    gc.collect()  # otherwise tensors of earlier tests may be freed within the trace
    with (
        without_onednn(),
        rules as mode,
        mode,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen,
    ):
        workload = build(params)
        for step in steps:
            run_step(workload, Progress(), Marks(step))
    seen.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    memory = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])
    for before, event in pairwise(e["args"] for e in memory):
        if event["Total Allocated"] != before["Total Allocated"] + event["Bytes"]:
            return {}  # an event between the two is missing
    changes = [(e["ts"], e["args"]["Bytes"]) for e in memory]
    peaks: dict[str, int] = {}
    for phase in events:
        if phase["name"].startswith(tuple(f"{step} " for step in steps)) and "dur" in phase:
            peak = highest_between(phase["ts"], phase["ts"] + phase["dur"], changes)
            peaks[phase["name"]] = max(peak, peaks.get(phase["name"], 0))  # of all micro-batches
    return peaks


def highest_between(begin: float, end: float, changes: list[tuple[float, int]]) -> int:
    """Return the most bytes that are held in a span of time, from the changes and their times."""
    held = highest = sum(nbytes for at, nbytes in changes if at < begin)
    for at, nbytes in sorted(changes):
        if begin <= at <= end:
            held += nbytes
            highest = max(highest, held)
    return highest


def predicted_peaks(params: TrainStepParams) -> dict[str, int]:
    peaks = replay(track(params), CachingAllocator(), 1)
    return {f"{step} {phase}": found.requested for (step, phase), found in peaks.items() if phase}


OPTIONS: list[dict[str, Any]] = [
    *({"optimizer": name} for name in ("loop", "sgd", "adafactor", "muon")),
    {"optimizer": "torch.optim:RMSprop", "optimizer_args": {"momentum": 0.9}},
    *({"checkpointing": how} for how in ("blocks", "groups:2", "selective", "selective:2")),
    {"checkpointing": "blocks", "precision": "bf16"},
    {"gradient_accumulation": 2},
    {"gradient_accumulation": 3, "checkpointing": "selective"},
    *({"optimizer": name, "optimizer_step": "in_backward"} for name in ("fused", "adafactor")),
    {"num_kv_heads": 1, "tie_embeddings": True},
    # The gradients of the shared weight are added in place, unless the first one is a view.
    *(
        {"tie_embeddings": True, "precision": precision, "num_layers": 1, "context_length": 16}
        for precision in ("fp32", "bf16")
    ),
    {"lora": 4, "checkpointing": "blocks"},
    {"loss": "chunked", "context_length": 384},
    {"loss": "chunked", "context_length": 384, "precision": "bf16", "num_layers": 1},
]
REAL = [
    *({"pass": pass_} for pass_ in PHASES),
    *({"optimizer": optimizer} for optimizer in ("foreach", "fused")),
    *(
        {"attention": attention}
        for attention in ("torch_softmax", "weights_only", "recompute", "math")
    ),
    *({"precision": precision} for precision in ("bf16", "fp16", "bf16_pure")),
    *(
        {"precision": "bf16", "attention": attention}
        for attention in ("torch_softmax", "weights_only", "recompute")
    ),
    *OPTIONS,
]
IN_BRIEF = [{"pass": "forward"}, {"pass": "train_step"}]  # the phases of the others are theirs


@pytest.mark.parametrize(
    "values",
    [pytest.param(values, marks=() if values in IN_BRIEF else pytest.mark.slow) for values in REAL],
    ids=lambda values: " ".join(map(str, values.values())),
)
def test_predicted_peaks_agree_with_those_measured_on_the_cpu(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(SCRATCH, "_softmax_backward_data")  # the CPU's kernel takes none
    params = params_of(**SMALL | values)
    measured = measured_peaks(params, tmp_path)
    assert len(measured) == 2 * len(params.phases)
    # On the CPU, each checkpoint stores the state of the random numbers; a GPU has it on the host.
    states = 5200 * params.num_layers if params.checkpointing != "none" and params.num_layers else 0
    assert predicted_peaks(params) == pytest.approx(measured, rel=1.5e-3, abs=states)


class Liar(nn.Module):
    """Takes memory that no shape tells of: only where there is data."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        if not tokens.is_meta:
            self.hidden = torch.empty(1_000_000)
        return functional.linear(self.table(tokens), self.table.weight)


def test_a_model_that_lies_shows_a_difference(tmp_path: Path) -> None:
    own = {
        "device": "cpu",
        "model": f"{__name__}:Liar",
        "context_length": 8,
        "batch_size": 1,
        "vocab_size": 50,
    }
    measured, predicted = (
        measured_peaks(params_of(**own), tmp_path),
        predicted_peaks(params_of(**own)),
    )
    assert measured["steady forward"] - predicted["steady forward"] >= 4_000_000


def prediction_of(caps_bytes: tuple[int, ...] = (), **values: Any) -> Prediction:
    return Predictor().predict(
        PredictionRequest(make_cell("train_step", values), caps_bytes, HOPPER)
    )


@pytest.mark.parametrize(
    ("size", "every"),
    [("small", 3), *(pytest.param(size, every, marks=pytest.mark.slow) for size, every in SLOW)],
)
def test_predicted_peaks_agree_with_those_measured_on_an_h200(size: str, every: int) -> None:
    """tests/data says with what and when: peaks within 0.5 %, what is reserved within 5 %, no verdict wrong, one in ten open.

    What is asked of the allocator is met but for 2 MiB, the scratch of kernels.
    """
    borderline = 0
    cells = [cell for cell in H200["cells"] if cell["size"] == size]
    for cell in cells[every - 1 :: every]:
        axes = {name: cell[name] for name in ("size", "context_length", "precision")}
        prediction = prediction_of((32 * GIB,), **axes)
        found = {(f"{s.mode} {s.phase}", s.metric): s.value for s in prediction.samples}
        for phase, (requested, allocated, _) in cell["peaks_bytes"].items():
            assert found[phase, "peak_requested_bytes"] == pytest.approx(
                requested, rel=1e-4, abs=2 * 1024**2
            ), (axes, phase)
            assert found[phase, "peak_allocated_bytes"] == pytest.approx(allocated, rel=0.02), (
                axes,
                phase,
            )
        steady = [
            peaks for phase, peaks in cell["peaks_bytes"].items() if phase.startswith("steady")
        ]
        assert prediction.peak_bytes() == pytest.approx(
            max(allocated for _, allocated, _ in steady), rel=5e-3
        ), axes
        assert prediction.peak_bytes("peak_reserved_bytes") == pytest.approx(
            max(peaks[2] for peaks in steady), rel=0.05
        ), axes
        verdict = prediction.verdicts[32 * GIB]
        borderline += verdict == "borderline"
        assert verdict in ("borderline", {"ok": "fits", "oom": "oom"}[cell["under_32_gib"]]), axes
    assert borderline <= 2


@pytest.mark.process
def test_the_first_cell_of_a_process_is_predicted_as_any_other() -> None:
    """Nothing is collected meanwhile: what torch holds on to when it does something for the first time would be counted."""
    values = {"d_head": 64, "context_length": 8192, "causal": True, "attention": "naive"}
    asked = PredictionRequest(make_cell("attention", values), (), HOPPER).to_json() + "\n"
    ours, theirs = socket.socketpair()
    code = "import socket; from tasks.prediction.service import answer_requests;"
    code += f"answer_requests(socket.socket(fileno={theirs.fileno()}))"
    command = [sys.executable, "-c", code]
    with ours, subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()]):
        theirs.close()
        ours.sendall(f"{os.devnull}\n{asked * 2}".encode())
        ours.shutdown(socket.SHUT_WR)
        first, second = ours.makefile().readlines()
    assert first == second


@pytest.mark.parametrize(
    ("pass_", "precision", "context_length", "gib"),
    [
        ("forward", "fp32", 128, 12.90),
        ("forward", "fp32", 512, 13.42),
        ("forward", "bf16", 128, 19.18),
        ("forward", "bf16", 512, 19.38),
    ],
)
def test_published_figures_of_the_forward_pass(
    pass_: str, precision: str, context_length: int, gib: float
) -> None:
    """Of a public write-up of the course's 2.7B model on a GPU."""
    prediction = prediction_of(
        size="2.7B", precision=precision, context_length=context_length, **{"pass": "forward"}
    )
    assert (prediction.peak_bytes() or 0) / GIB == pytest.approx(gib, rel=0.01)


def test_the_roles_add_up_to_the_peak() -> None:
    prediction = prediction_of(size="mini", context_length=256)
    roles = {s.note: s.value or 0 for s in prediction.samples if s.metric == "at_peak_bytes"}
    assert sum(roles.values()) == prediction.peak_bytes()
    assert roles["parameters"] == 4 * parameter_count(SIZES[2025]["mini"])
    assert roles["optimizer state"] == 2 * roles["parameters"]
    assert roles["workspace"] == 2 * HOPPER


def test_autocast_keeps_a_copy_of_each_matrix_that_multiplies() -> None:
    """Two bytes an element; the embedding is looked up and the norms are computed in fp32."""
    dims = SIZES[2025]["mini"]
    prediction = prediction_of(
        size="mini", context_length=64, precision="bf16", **{"pass": "forward"}
    )
    roles = {s.note: s.value for s in prediction.samples if s.metric == "at_peak_bytes"}
    matrices = (
        parameter_count(dims) - VOCAB_SIZE * dims.d_model - (2 * dims.num_layers + 1) * dims.d_model
    )
    assert roles["autocast weight copies"] == 2 * matrices


def test_the_pass_alone_is_in_the_whole_step() -> None:
    """A predictor that has just followed the whole step says the same of its passes as one that follows them."""
    cell = {"size": "mini", "context_length": 64, "precision": "bf16"}
    predictor = Predictor()
    predictor.predict(PredictionRequest(make_cell("train_step", cell), (), HOPPER))
    passes = PredictionRequest(
        make_cell("train_step", {**cell, "pass": "forward_backward"}), (), HOPPER
    )
    assert predictor.predict(passes) == Predictor().predict(passes)


@pytest.mark.parametrize(
    ("attention", "precision", "squares_bytes"),
    [
        ("naive", "fp32", 2 * 2 * 2 * 4 * 512**2),
        ("sdpa", "fp32", 0),
        ("efficient", "fp32", 0),
        ("flash", "bf16", 0),
        ("cudnn", "bf16", 0),
        ("flex", "fp32", 0),
    ],
)
def test_fused_attention_has_no_squares(attention: str, precision: str, squares_bytes: int) -> None:
    cell = {
        "size": "tiny",
        "context_length": 512,
        "batch_size": 1,
        "attention": attention,
        "precision": precision,
    }
    prediction = prediction_of(**cell)
    assert prediction.how == ("tracked" if attention == "naive" else "modelled"), prediction.reason
    assert prediction.role_bytes().get("activations: attention squares", 0) == squares_bytes


@pytest.mark.parametrize(
    ("backend", "dtype", "measured_mib"),
    [
        (SDPBackend.FLASH_ATTENTION, torch.bfloat16, 80.5),
        (SDPBackend.CUDNN_ATTENTION, torch.bfloat16, 80.5),
        (SDPBackend.EFFICIENT_ATTENTION, torch.bfloat16, 80.53),
        (SDPBackend.EFFICIENT_ATTENTION, torch.float32, 128.53),
    ],
)
def test_fused_backward_passes_take_what_an_h200_measured(
    backend: SDPBackend, dtype: torch.dtype, measured_mib: float
) -> None:
    """Causal attention alone: 16,384 tokens, 8 sequences, width 64; the peak less what is held when it begins."""
    tracker = StorageTracker()
    with tracker, sdpa_kernel(backend):
        query, key, value, grad = (
            torch.empty(8, 1, 16384, 64, dtype=dtype, device="meta", requires_grad=place < 3)
            for place in range(4)
        )
        tracker.begin("first")
        tracker.enter("forward")
        output = fused_attention(SdpaCall(query, key, value, is_causal=True))
        tracker.leave("forward")
        tracker.enter("backward")
        output.backward(grad)
        tracker.leave("backward")
    peaks = replay(tracker.trace, CachingAllocator(), 0)
    taken = peaks["first", "backward"].requested - peaks["first", "forward"].held_allocated
    assert taken / 1024**2 == pytest.approx(measured_mib, abs=0.05)


def test_a_cell_that_cannot_be_predicted_has_a_reason() -> None:
    own = {"model": "tests.support.misbehaving:NoSuch"}
    assert "NoSuch" in prediction_of(**own).reason
    speechless = {"model": "tests.support.misbehaving:Model", "model_args": {"how": "speechless"}}
    assert "its message cannot be read" in prediction_of(**speechless).reason
    assert (
        "No available kernel"
        in prediction_of(size="tiny", attention="flash", precision="fp32").reason
    )
    assert "process" in prediction_of(size="tiny", device="cpu").reason
    matmul = Predictor().predict(PredictionRequest(make_cell("matmul", {})))
    assert (matmul.how, matmul.peak_bytes()) == ("", None)
    assert "matmul" in matmul.reason


@pytest.mark.parametrize(
    "values",
    [
        {"context_length": 128},
        {"context_length": 1024, "num_layers": 12},
        {"context_length": 128, "optimizer": "foreach"},
        {"context_length": 128, "optimizer": "fused"},
        {"context_length": 256, "pass": "forward_backward"},
    ],
    ids=lambda values: " ".join(map(str, values.values())),
)
def test_the_closed_form_explains_what_is_tracked(values: dict[str, Any]) -> None:
    """Within 1 % of what is asked for at the steady peak, workspaces aside."""
    # Four of the 12 layers of the size `small`: all are the same.
    shape = {"d_model": 768, "d_ff": 3072, "num_layers": 4, "num_heads": 12}
    params = params_of(**shape | values)
    peaks = replay(track(params), CachingAllocator(), 1)
    tracked = max(found.requested for (step, _), found in peaks.items() if step == "steady")
    found = closed_form(params)
    assert found is not None
    assert found.nbytes == pytest.approx(tracked, rel=0.01)
    assert found.nbytes == pytest.approx(max(moment.nbytes for moment in found.moments), abs=16)


def test_the_closed_form_of_pure_bf16_covers_parameters_and_gradients_only() -> None:
    found = closed_form(
        params_of(size="small", precision="bf16_pure", **{"pass": "forward_backward"})
    )
    assert found is not None
    count = parameter_count(SIZES[2025]["small"])
    assert {term.name: term.nbytes for term in found.terms} == {
        "parameters": 2 * count, "gradients": 2 * count, "optimizer state": 0,
    }  # fmt: skip
    assert not found.moments


def test_a_missing_package_is_the_whole_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Predictor, *words: object) -> None:
        raise ImportError("hf: needs transformers")

    monkeypatch.setattr(Predictor, "_trace", fail)
    assert prediction_of(size="small").reason == "hf: needs transformers"


class NeedsData(nn.Module):
    """Looks at its input: without data there is nothing to see. Half of it is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 16)
        self.frozen = nn.Parameter(torch.zeros(1000, 16), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.frozen.sum().item() > 0:
            raise ValueError
        return functional.linear(self.table(tokens), self.table.weight)


def test_a_model_that_needs_data_is_predicted_to_take_at_least_its_parameters() -> None:
    caps = (2**20, 200_000, 100_000)
    prediction = prediction_of(caps, model=f"{__name__}:NeedsData", context_length=8)
    assert (prediction.how, prediction.peak_bytes()) == ("closed form", None)
    assert "does not run without data" in prediction.reason
    assert prediction.role_bytes("closed_form_bytes") == {
        "parameters": 128_000, "gradients": 64_000, "optimizer state": 128_000,
    }  # fmt: skip
    assert prediction.least_bytes() == 320_000
    # The loss may leave out parameters, which then have no gradient.
    assert prediction.verdicts == {200_000: "unlikely", 100_000: "oom"}
    assert prediction.reason.endswith(
        "; with a gradient for each trained parameter it is too large"
    )
    assert "0.0 GiB" in prediction.why_oom(200_000)
    compiled = make_cell("train_step", {"size": "tiny", "compile": "blocks"})
    assert prediction.of_cell(compiled) == prediction
    assert (
        torch.overrides._len_torch_function_stack() == 0
    )  # what is predicted next is not disturbed


class CudaOnly(torch.optim.SGD):
    """An optimizer whose step has no kernel for tensors without data."""

    def step(self, closure: object = None) -> None:
        raise NotImplementedError("there is no kernel for tensors of the backend Meta")


def test_an_optimizer_with_kernels_for_cuda_only_has_a_lower_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = ModuleType("bitsandbytes")
    package.AdamW8bit = CudaOnly  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", package)
    prediction = prediction_of((), size="tiny", optimizer="bitsandbytes.optim:AdamW8bit")
    assert prediction.how == "closed form"
    assert prediction.reason == (
        "the kernels of bitsandbytes exist for CUDA only, so only parameters and gradients are "
        "predicted"
    )
    roles = prediction.role_bytes("closed_form_bytes")
    assert roles == {
        "parameters": roles["parameters"],
        "gradients": roles["parameters"],
        "optimizer state": 0,
    }


def of_compiled_cell(prediction: Prediction, **values: Any) -> Prediction:
    given = {"size": "tiny", "compile": "blocks"}
    if "model" in values:
        del given["size"]
    return prediction.of_cell(make_cell("train_step", given | values))


def test_a_compiled_cell_that_is_predicted_as_eager_is_never_oom() -> None:
    prediction = prediction_of((2**20,), size="tiny")
    assert prediction.verdicts == {2**20: "oom"}
    as_eager = of_compiled_cell(prediction)
    assert (as_eager.how, as_eager.verdicts) == ("as eager", {2**20: "unlikely"})
    held = round(
        max(s.value for s in prediction.samples if s.metric == "peak_requested_bytes" and s.value)
    )
    caps: dict[int, Verdict] = {
        held // 3: "oom",
        held // 2: "oom",
        held: "borderline",
        round(1.05 * held): "fits",
        2 * held: "fits",
    }
    judged = replace(prediction, verdicts=caps)
    assert list(of_compiled_cell(judged).verdicts.values()) == [
        "unlikely", "perhaps", "borderline", "fits", "fits",
    ]  # fmt: skip
    of_hub = of_compiled_cell(judged, model="hf:gpt2", compile="model")
    assert list(of_hub.verdicts.values()) == [
        "unlikely", "perhaps", "borderline", "perhaps", "fits",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "how", "reason"),
    [
        ({}, "as eager", "torch's compiler needs a GPU for this model"),
        ({"compile": "model"}, "as eager", "torch's compiler needs a GPU for this model"),
        (
            {"compile_mode": "max-autotune"},
            "as eager",
            "the CUDA graphs of max-autotune have memory of their own",
        ),
        ({"attention": "flex"}, "as eager", "flex attention is compiled in its own way"),
        (
            {"checkpointing": "blocks"},
            "as eager",
            "the compiler decides what its checkpoints compute again",
        ),
        (
            {"model": "hf:gpt2", "compile": "model"},
            "as eager, may take more",
            "compiled as a whole, a model of transformers builds its mask",
        ),
        (
            {"model": "a:B", "compile": "model"},
            "as eager",
            "torch's compiler needs a GPU for this model, or it is too large",
        ),
        ({"compile": "eager"}, "tracked", ""),
    ],
)
def test_a_compiled_cell_that_is_predicted_as_eager_has_a_reason(
    values: dict[str, Any], how: str, reason: str
) -> None:
    sample = Sample("prediction", "peak_allocated_bytes", "bytes", 1.0, "steady", note="tracked")
    found = of_compiled_cell(Prediction("tracked", "", (sample,)), **values)
    too_high = "; the cell may take as little as 1/2.11 of this" if how == "as eager" else ""
    assert (found.how, found.reason) == (how, reason + too_high)
    assert found.samples[0].note == how


def test_a_model_compiled_as_a_whole_has_twice_the_margin() -> None:
    samples = [
        Sample("prediction", f"peak_{kind}_bytes", "bytes", 1000.0, "steady", note="compiled")
        for kind in ("allocated", "requested", "reserved")
    ]
    caps: dict[int, Verdict] = {
        930: "oom",
        960: "oom",
        1000: "borderline",
        1040: "fits",
        1070: "fits",
    }
    blocks = Prediction("compiled", "", tuple(samples), caps)
    assert of_compiled_cell(blocks) == blocks
    whole = of_compiled_cell(blocks, compile="model")
    assert (whole.how, {one.note for one in whole.samples}) == ("as blocks", {"as blocks"})
    assert list(whole.verdicts.values()) == ["oom", *["borderline"] * 3, "fits"]


def test_an_implementation_without_a_kernel_for_the_dtype_is_not_predicted() -> None:
    cell = make_cell("attention", {"attention": "cudnn", "context_length": 256, "d_head": 16})
    prediction = Predictor().predict(PredictionRequest(cell))
    assert prediction.how == ""
    assert prediction.reason.startswith(
        "attention: cudnn has no kernel in torch for fp32 and this shape on this device: "
    )


def test_compiled_attention_alone_is_predicted_as_eager() -> None:
    cell = make_cell("attention", {"compile": "model"})
    found = Prediction("tracked").of_cell(cell)
    assert found.how == "as eager"
    assert found.reason.startswith("attention alone is compiled as a whole; ")


def test_verdicts_from_peaks_alone_agree_with_the_simulated_allocator() -> None:
    caps = tuple(round(2**24 * 1.1**power) for power in range(40))
    prediction = prediction_of(caps, size="tiny", context_length=64, batch_size=2)
    plain = {cap: prediction.plain_verdict(cap) for cap in caps}
    assert {cap: verdict for cap, verdict in plain.items() if verdict} == {
        cap: verdict for cap, verdict in prediction.verdicts.items() if plain[cap]
    }
    assert {"fits", "oom"} <= set(plain.values())


def test_answers_and_requests_travel_as_json() -> None:
    request = PredictionRequest(
        make_cell("train_step", {"size": "tiny"}), (GIB,), HOPPER, ("/somewhere",)
    )
    assert PredictionRequest.from_json(request.to_json()) == request
    prediction = Predictor().predict(request)
    assert Prediction.from_json(prediction.to_json()) == prediction


def test_axes_that_do_not_change_memory_leave_the_memory_identity_unchanged() -> None:
    def identity(**values: Any) -> dict[str, Any]:
        return memory_identity(make_cell("train_step", {"size": "tiny", **values}))

    same = {
        "seed": 7,
        "warmup_steps": 1,
        "measured_steps": 99,
        "memory_limit_gib": 3.0,
        "precision": "tf32",
        "compile": "blocks",
        "compile_mode": "max-autotune",
    }
    assert identity(**same) == identity()
    assert identity(compile="model") == identity(compile="blocks") != identity()
    for other in (
        {"precision": "bf16"},
        {"optimizer": "fused"},
        {"pass": "forward"},
        {"attention": "math"},
        {"batch_size": 1},
    ):
        assert identity(**other) != identity()


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda x, w: x @ w, torch.bfloat16),
        (lambda x, w: functional.linear(x, w), torch.bfloat16),
        (lambda x, w: torch.einsum("ij,jk->ik", x, w), torch.bfloat16),
        (lambda x, w: torch.exp(x.bfloat16()), torch.float32),
        (lambda x, w: x.bfloat16().pow(2), torch.float32),
        (lambda x, w: torch.softmax(x.bfloat16(), -1), torch.float32),
        (lambda x, w: x.bfloat16().sum(), torch.float32),
        (lambda x, w: functional.layer_norm(x.bfloat16(), (4,)), torch.float32),
        (
            lambda x, w: functional.cross_entropy(
                x.bfloat16(), torch.zeros(4, dtype=torch.long, device="meta")
            ),
            torch.float32,
        ),
        (lambda x, w: x.bfloat16() * x.bfloat16(), torch.bfloat16),
        (lambda x, w: x.bfloat16().mean(), torch.bfloat16),
        (lambda x, w: functional.silu(x.bfloat16()), torch.bfloat16),
    ],
)
def test_autocast_is_that_of_cuda(
    function: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype
) -> None:
    x, weight = torch.ones(4, 4, device="meta"), nn.Parameter(torch.ones(4, 4, device="meta"))
    with (
        gpu_emulated(lambda role: nullcontext()) as mode,
        mode,
        torch.autocast("cuda", dtype=torch.bfloat16),
    ):
        assert function(x, weight).dtype == dtype
        with torch.autocast("cuda", enabled=False):
            assert (x @ weight).dtype == torch.float32


def test_autocast_copies_a_weight_once_a_region() -> None:
    labelled: list[str] = []

    @contextmanager
    def labelling(role: str) -> Iterator[None]:
        labelled.append(role)
        yield

    weight = nn.Parameter(torch.ones(4, 4, device="meta"))
    with gpu_emulated(labelling) as mode, mode:
        for _ in range(2):
            with torch.autocast("cuda", dtype=torch.bfloat16), torch.no_grad():
                functional.linear(
                    functional.linear(torch.ones(4, 4, device="meta"), weight), weight
                )
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            functional.linear(torch.ones(4, 4, device="meta"), weight)
    assert labelled == ["autocast weight copies"] * 2


ATTENTION = json.loads((ROOT / "tests" / "data" / "h200_attention.json").read_text())


@pytest.mark.parametrize(
    "cell", ATTENTION["cells"], ids=lambda cell: f"{cell['attention']} {cell['precision']}"
)
def test_attention_alone_is_what_an_h200_measured(cell: dict[str, Any]) -> None:
    """tests/data says with what and when; to 0.03 MiB, but for a workspace of cuBLAS, and squares as the formula counts them."""
    axes = {name: cell[name] for name in ("attention", "precision")}
    params = {"context_length": 16384, "batch_size": 8, "d_head": 64, "causal": True, **axes}
    prediction = Predictor().predict(PredictionRequest(make_cell("attention", params), (), HOPPER))
    found = {(s.mode, s.phase, s.metric): s.value or 0 for s in prediction.samples}
    measured, one = cell["bytes"], found["steady", "", "square_bytes"]
    predicted = {
        "built": found["built", "", "held_allocated_bytes"],
        "forward": found["steady", "forward", "peak_allocated_bytes"],
        "backward": found["steady", "backward", "peak_allocated_bytes"],
        "held": found["steady", "forward", "held_allocated_bytes"],
        "saved_squares": found.get(("steady", "", "saved_square_bytes"), 0),
    }
    for what, nbytes in measured.items():
        assert (
            min(abs(nbytes - predicted[what] - other) for other in (-HOPPER, 0, HOPPER))
            <= 0.04 * 1024**2
        ), what
    assert measured["saved_squares"] == found["steady", "", "formula_saved_squares"] * one
    for phase in ("forward", "backward"):
        squares = (measured[phase] - measured["built"]) / one
        mask = (
            0.4 if phase == "forward" else 0.0
        )  # of one sequence: bytes, and where `math` adds it up in the inputs' width
        assert -0.01 <= squares - found["steady", "", f"formula_{phase}_squares"] <= 0.1 + mask


def test_square_bytes_are_not_predicted_for_mixed_precision_and_sdpa() -> None:
    shape = {"context_length": 256, "d_head": 16}
    for known, values in (
        (True, {}),
        (True, {"precision": "tf32"}),
        (False, {"precision": "bf16"}),
        (False, {"attention": "sdpa"}),
    ):
        prediction = Predictor().predict(
            PredictionRequest(make_cell("attention", {**shape, **values}))
        )
        assert prediction.how
        assert any(s.metric == "square_bytes" for s in prediction.samples) is known
    cold = Predictor().predict(
        PredictionRequest(make_cell("attention", {**shape, "cold_l2": True}))
    )
    assert "depends on the GPU" in cold.reason
    with_projections = Predictor().predict(
        PredictionRequest(make_cell("attention", {**shape, "projections": True}))
    )
    assert with_projections.role_bytes()["parameters"] == 4 * 4 * 16**2


class CheckpointedBlock(nn.Module):
    """A block whose attention or feed-forward part is one of several kinds."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind, self.norm = kind, nn.LayerNorm(width)
        self.a, self.b = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind in ("linear", "norm", "dropout"):
            inner = self.b(functional.gelu(self.a(self.norm(x) if self.kind == "norm" else x)))
            return x + functional.dropout(inner, 0.1 if self.kind == "dropout" else 0.0)
        heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
        if self.kind == "sdpa":
            mixed = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        else:
            mixed = (heads @ heads.transpose(-1, -2)).softmax(-1) @ heads
        return x + mixed.transpose(1, 2).flatten(-2)


class Checkpointed(nn.Module):
    """A model whose blocks run again in the backward pass. how: null for no checkpoints."""

    def __init__(self, kind: str, how: str | None = None, width: int = 64) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, width), nn.Linear(width, 64)
        self.blocks = nn.ModuleList(CheckpointedBlock(kind, width) for _ in range(3))
        self.how = how

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        for block in self.blocks:
            if self.how is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.how == "reentrant")
        logits: Tensor = self.head(x)
        return logits


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("kind", ["linear", "norm", "dropout", "sdpa", "softmax"])
def test_a_model_with_checkpoints_is_predicted_and_needs_no_more_than_without(
    kind: str, how: str, precision: str
) -> None:
    shape = {"context_length": 256, "vocab_size": 64, "precision": precision}
    model = {"size": None, "model": f"{__name__}:Checkpointed", **shape}
    plain = prediction_of(**model, model_args={"kind": kind})
    checkpointed = prediction_of(**model, model_args={"kind": kind, "how": how})
    assert (plain.how, checkpointed.how) == ("tracked", "tracked"), checkpointed.reason
    for metric in ("peak_allocated_bytes", "peak_reserved_bytes"):
        assert 0 < (checkpointed.peak_bytes(metric) or 0) <= (plain.peak_bytes(metric) or 0)


@pytest.mark.parametrize(
    ("kind", "precision", "measured_mib"),
    [("linear", "bf16", 490.1), ("linear", "fp32", 686.1), ("dropout", "fp32", 710.1)],
)
def test_biases_and_dropout_take_what_a_gpu_measured(
    kind: str, precision: str, measured_mib: float
) -> None:
    """Peaks on an H200 (linear) and an H100 (dropout), torch 2.11."""
    shape = {"context_length": 1024, "batch_size": 8, "vocab_size": 64, "precision": precision}
    arguments = {"kind": kind, "width": 512}
    prediction = prediction_of(
        size=None, model=f"{__name__}:Checkpointed", model_args=arguments, **shape
    )
    assert (prediction.peak_bytes() or 0) / 1024**2 == pytest.approx(measured_mib, rel=0.003)


def test_code_in_the_backward_pass_calls_the_kernels_of_a_gpu() -> None:
    """A function of the user's own that computes attention again."""
    model = {"size": None, "model": f"{__name__}:attend_again", "vocab_size": 64}
    short, long = (
        prediction_of(**model, context_length=length).peak_bytes() for length in (1024, 2048)
    )
    assert short is not None
    assert long is not None
    assert long < 2.2 * short  # a square of scores would make it four times as much


class AttendAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return functional.scaled_dot_product_attention(x, x, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * functional.scaled_dot_product_attention(x, x, x)


def attend_again() -> nn.Module:
    class Model(nn.Sequential):
        def forward(self, tokens: Tensor) -> Tensor:
            x = AttendAgain.apply(self[0](tokens).unsqueeze(1))  # type: ignore[no-untyped-call]
            logits: Tensor = self[1](x.squeeze(1))
            return logits

    return Model(nn.Embedding(64, 16), nn.Linear(16, 64))


def too_long() -> nn.Module:
    raise ValueError("first line\n" + "x" * 500)


def test_the_reason_for_no_prediction_is_a_whole_text_in_one_line() -> None:
    reason = prediction_of(size=None, model=f"{__name__}:too_long").reason
    assert reason.endswith("ValueError: first line " + "x" * 500)
