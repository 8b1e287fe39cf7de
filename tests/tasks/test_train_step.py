from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from model.accounting import forward_flops
from model.config import SIZES
from orchestrator.execution.measurement import execute
from tasks.harness import device as device_module
from tasks.harness.device import Skip
from tasks.harness.precision import set_precision
from tasks.harness.stage import Session
from tasks.instruments import stages_of
from tasks.process.phase_file import Progress
from tasks.spec.attempt import Attempt
from tasks.spec.status import Status
from tasks.train_step import build
from tasks.training import losses
from tasks.training.parameters import PHASES, TrainStepParams

TINY: dict[str, Any] = {
    "device": "cpu",
    "size": "tiny",
    "vocab_size": 200,
    "context_length": 8,
    "batch_size": 2,
    "warmup_steps": 1,
    "measured_steps": 2,
}


@pytest.fixture(autouse=True)
def _flags_as_before() -> Any:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("pass_", PHASES)
def test_each_pass_has_its_phases_and_flops(pass_: Any) -> None:
    workload = build(TrainStepParams.model_validate({**TINY, "pass": pass_}))
    seen: list[str] = []

    def phase(name: str) -> AbstractContextManager[None]:
        seen.append(name)
        return nullcontext()

    workload.step(phase)
    assert tuple(seen) == workload.phases == PHASES[pass_]
    forward = forward_flops(SIZES[2025]["tiny"], 2, 8, TINY["vocab_size"])
    assert workload.flops == (
        {"forward": forward, "backward": 2 * forward}
        if "backward" in seen
        else {"forward": forward}
    )
    assert workload.tokens == 16


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16_pure"])
def test_precision_is_read_back(precision: str) -> None:
    workload = build(TrainStepParams.model_validate({**TINY, "precision": precision}))
    workload.step(lambda name: nullcontext())
    assert workload.facts["float32_matmul_precision"] == "highest"
    assert workload.facts["autocast_dtype"] == {"bf16": "bfloat16", "fp16": "float16"}.get(
        precision
    )
    assert workload.facts["parameter_dtype"] == (
        "bfloat16" if precision == "bf16_pure" else "float32"
    )
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(("precision", "override"), [("fp32", "1"), ("tf32", "0")])
def test_a_precision_that_an_environment_variable_overrules_is_refused(
    precision: str, override: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", override)
    with pytest.raises(
        RuntimeError,
        match=f"NVIDIA_TF32_OVERRIDE={override} overrules {precision} in every matrix product",
    ):
        set_precision(
            TrainStepParams.model_validate({**TINY, "device": "cuda", "precision": precision})
        )
    set_precision(TrainStepParams.model_validate(TINY))  # of no product on the CPU


@pytest.mark.compile
@pytest.mark.parametrize(
    ("instruments", "stage"), [(("timing", "memory"), "compile"), (("memory",), "memory")]
)
def test_a_cell_that_should_compile_but_compiled_nothing_fails(
    instruments: tuple[str, ...], stage: str, make_attempt: Callable[..., Attempt]
) -> None:
    settings = {"env": {"TORCHDYNAMO_DISABLE": "1"}, "instruments": instruments}
    outcome = execute(make_attempt(compile="blocks", settings=settings))
    assert (outcome.status, outcome.stage) == (Status.FAILED, stage)
    assert "compiled nothing: unset TORCHDYNAMO_DISABLE=1" in outcome.evidence["message"]


def test_training_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is a real one: over the same batch the loss falls."""
    losses: list[float] = []
    real = torch.nn.functional.cross_entropy

    def watched(*args: Any) -> torch.Tensor:
        loss = real(*args)
        losses.append(loss.item())
        return loss

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", watched)
    workload = build(TrainStepParams.model_validate(TINY))
    for _ in range(40):
        workload.step(lambda name: nullcontext())
    assert losses[-1] < losses[0] * 0.7


def test_same_seed_same_numbers() -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(99)
        build(TrainStepParams.model_validate({**TINY, "seed": seed}))
        return torch.rand(3)

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"size": None}, "exactly one way"),
        ({"d_model": 8}, "exactly one way"),
        ({"size": None, "d_model": 8}, "go together"),
        (
            {"size": None, "d_model": 10, "d_ff": 8, "num_layers": 1, "num_heads": 3},
            "not divisible",
        ),
        *(
            ({"size": None, "model": own}, "package.module:Factory")
            for own in ("no_colon", "package:", ":Factory", ":", "")
        ),
        ({"model_args": {"a": 1}}, "name it with model"),
        ({"size": "10B"}, "not of 2025"),
        ({"size": "2.7B", "year": 2026}, "not of 2026"),
        ({"measured_steps": 0}, "greater than or equal to 1"),
        ({"memory_limit_gib": 0}, "greater than or equal to 0.00195"),
        ({"memory_limit_gib": 1e-300}, "greater than or equal to 0.00195"),
        ({"memory_limit_gib": 1e300}, "less than or equal to 1000000"),
        ({"precision": "fp8"}, "Input should be"),
        *(
            ({axis: 2**63}, f"{axis}\n.*must fit in 63 bits")
            for axis in ("seed", "batch_size", "measured_steps", "vocab_size")
        ),
        ({"timing": "adaptive", "most_seconds": float("inf")}, "finite number"),
        *(
            ({"size": None, "model": "a:b", "model_args": {"x": given}}, message)
            for given, message in (
                ({2: 8}, "x: the key 2 is not a text"),
                ([{"y": {None: 1}}], r"x\[0\].y: the key None is not a text"),
                ([1, float("-inf")], r"x\[1\]: -inf is not finite"),
            )
        ),
    ],
)
def test_parameters_that_cannot_be(wrong: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        TrainStepParams.model_validate({**TINY, **wrong})


def test_a_seed_may_be_the_largest_64_bit_integer() -> None:
    assert TrainStepParams.model_validate({**TINY, "seed": 2**63 - 1}).seed == 2**63 - 1


def test_blocks_need_blocks() -> None:
    params = {
        **TINY,
        "size": None,
        "model": "torch.nn:Embedding",
        "model_args": {"num_embeddings": 9, "embedding_dim": 4},
    }
    with pytest.raises(Skip, match="ModuleList"):
        build(TrainStepParams.model_validate({**params, "compile": "blocks"}))


def test_a_model_in_a_file_called_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.py").write_text(
        "from dataclasses import dataclass\nfrom torch import nn\n@dataclass\nclass C:\n    n: int\n"
        "def GPT():\n    return nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "own_model", None)
    del sys.modules["own_model"]
    params = {**TINY, "size": None, "model": "model:GPT", "vocab_size": 9}
    workload = build(TrainStepParams.model_validate(params))
    assert workload.facts["parameters"] == 9 * 4 * 2 + 9
    assert workload.facts["model_source"] is not None


def test_the_first_step_is_watched_whichever_it_is() -> None:
    for warmup in (0, 1):
        params = TrainStepParams.model_validate({**TINY, "warmup_steps": warmup})
        session = Session(build(params), params, Progress())
        samples = [
            s for stage in stages_of(["timing", "memory", "telemetry"]) for s in stage.run(session)
        ]
        first = [s.phase for s in samples if (s.mode, s.metric) == ("first", "peak_rss_bytes")]
        assert first == ["forward", "backward", "optimizer"]
        assert [s.step for s in samples if (s.mode, s.phase) == ("synced", "step")] == [0, 1]
        assert len([s for s in samples if (s.mode, s.phase) == ("warmup", "step")]) == warmup


def test_memory_alone_measures_the_first_step_too() -> None:
    params = TrainStepParams.model_validate(TINY)
    session = Session(build(params), params, Progress())
    samples = [s for stage in stages_of(["memory"]) for s in stage.run(session)]
    for metric in ("peak_rss_bytes", "held_rss_bytes"):
        modes = [s.mode for s in samples if s.metric == metric and s.phase]
        assert modes == ["first"] * 3 + ["steady"] * 3
    assert [s.mode for s in samples if s.metric == "held_rss_bytes" and not s.phase] == ["built"]
    assert {s.metric: s.value for s in samples}["saved_squares"] == 2 * 2  # two layers, two each


def test_a_peak_that_cannot_be_reset_is_null_with_a_note(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would be that of the whole life of the process."""
    monkeypatch.setattr(device_module, "_CLEAR_REFS", tmp_path)  # a folder takes no text
    params = TrainStepParams.model_validate(TINY)
    session = Session(build(params), params, Progress())
    samples = [s for stage in stages_of(["memory"]) for s in stage.run(session)]
    peaks = [s for s in samples if s.metric == "peak_rss_bytes"]
    assert [(s.mode, s.value) for s in peaks] == [("first", None)] * 3 + [("steady", None)] * 3
    assert {s.note for s in peaks} == {f"the peak cannot be reset: {tmp_path}: Is a directory"}
    assert all(s.value and not s.note for s in samples if s.metric == "held_rss_bytes")


@pytest.mark.parametrize(
    ("attention", "squares"), [("torch_softmax", 2), ("recompute", 0), ("flash", 0)]
)
def test_attention_is_an_axis_of_the_transformer(attention: str, squares: int) -> None:
    """The same weights give the same loss, whatever computes the attention; what is saved differs."""
    losses = []
    for name in ("naive", attention):
        params = TrainStepParams.model_validate({**TINY, "attention": name})
        workload = build(params)
        with pytest.MonkeyPatch.context() as patch:
            real = torch.nn.functional.cross_entropy
            patch.setattr(
                torch.nn.functional,
                "cross_entropy",
                lambda *a: losses.append(real(*a)) or losses[-1],  # noqa: B023
            )
            workload.step(lambda phase: nullcontext())
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    session = Session(workload, params, Progress())
    samples = [s for stage in stages_of(["memory"]) for s in stage.run(session)]
    assert {s.metric: s.value for s in samples}["saved_squares"] == squares


def test_a_model_of_ones_own_has_its_own_attention() -> None:
    own = {
        **TINY,
        "size": None,
        "model": "torch.nn:Embedding",
        "model_args": {"num_embeddings": 9, "embedding_dim": 4},
    }
    with pytest.raises(ValidationError, match="yours computes its own"):
        TrainStepParams.model_validate({**own, "attention": "flash"})


class Gives(nn.Module):
    """Logits, but for what `what` says of them; and how often it was called."""

    def __init__(self, what: str = "logits") -> None:
        super().__init__()
        self.head, self.what, self.calls = nn.Parameter(torch.zeros(1000)), what, 0

    def forward(self, tokens: torch.Tensor) -> Any:
        self.calls += 1
        logits = tokens[..., None] * self.head[: 150 if self.what == "narrow" else 201]
        match self.what:
            case "a list":
                return [logits]
            case "flat":
                return logits.flatten(0, 1)
            case "the last alone":
                return logits[:, -1:]
            case "turned":
                return logits.transpose(0, 1)
            case "of each alone":
                return logits[None]
        return logits


def gives(what: str, **params: Any) -> TrainStepParams:
    own = {"size": None, "model": f"{__name__}:Gives", "model_args": {"what": what}}
    return TrainStepParams.model_validate({**TINY, **own, **params})


@pytest.mark.parametrize("pass_", ["forward", "train_step"])
@pytest.mark.parametrize(
    ("what", "given"),
    [
        ("a list", "a list"),
        ("flat", "a tensor of (16, 201)"),
        ("the last alone", "a tensor of (2, 1, 201)"),
        ("turned", "a tensor of (8, 2, 201)"),
        ("of each alone", "a tensor of (1, 2, 8, 201)"),
        ("narrow", "a tensor of (2, 8, 150)"),
    ],
)
def test_an_output_that_does_not_have_the_shape_of_logits_is_refused(
    what: str, given: str, pass_: str
) -> None:
    workload = build(gives(what, **{"pass": pass_}))
    said = f"the model gives {given}, where logits are a tensor of (2, 8, 200 or more): batch, context, vocabulary"
    with pytest.raises(ValueError, match=re.escape(said)):
        workload.step(lambda name: nullcontext())


@pytest.mark.parametrize("pass_", PHASES)
def test_logits_are_looked_at_in_the_first_step_alone(
    pass_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[object] = []
    monkeypatch.setattr(losses, "require_logits", lambda logits, params: looks.append(logits))
    workload = build(gives("logits", **{"pass": pass_}))
    for _ in range(3):
        workload.step(lambda name: nullcontext())
    assert workload.model is not None
    assert (len(looks), workload.model.calls) == (1, 3)


@pytest.mark.compile
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile on the CPU needs a C++ compiler")
def test_compiled_blocks_on_the_cpu(make_attempt: Callable[..., Attempt]) -> None:
    """Cold, then warm from the cache that the cells of a run share: as torch counted, not as intended."""
    settings = {"timeout_s": 150.0}
    cold = execute(make_attempt(settings=settings, compile="blocks", **{"pass": "forward"}))
    assert cold.status is Status.OK, cold.evidence
    assert (cold.facts["compile_graphs"], cold.facts["compile_graph_breaks"]) == (1, 0)
    assert cold.facts["compile_cache_misses"] > 0 == cold.facts["compile_cache_hits"]
    warm = execute(
        make_attempt(number=2, settings=settings, compile="blocks", **{"pass": "forward"})
    )
    assert warm.facts["compile_cache_hits"] > 0 == warm.facts["compile_cache_misses"]
    first = [
        s.value
        for one in (cold, warm)
        for s in one.samples
        if (s.mode, s.phase) == ("compile", "step") and s.value
    ]
    assert first[1] < first[0]
