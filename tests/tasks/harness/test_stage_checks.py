"""Work that did not happen fails the cell: optimizer steps, blocks, gradients, settings, the clock."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim import Optimizer

from tasks.harness import precision
from tasks.harness.compilation import compile_module
from tasks.harness.model_parts import blocks_of, first_block
from tasks.harness.process_settings import changed_settings, read_settings
from tasks.harness.stage import Session
from tasks.harness.stage_checks import StageChecks, _state_of
from tasks.instruments.timing import SyncedTimer
from tasks.process.cpu_affinity import spans
from tasks.process.phase_file import Progress
from tasks.train_step import build
from tasks.training.parameters import TrainStepParams

HERE = "tests.tasks.harness.test_stage_checks"


class Model(nn.Module):
    """A model whose loss may be NaN in its first steps, and which may change torch's settings."""

    def __init__(self, bad_steps: int = 0, harm: str = "") -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(101, 8), nn.Linear(8, 101)
        self.bad_steps, self.harm = bad_steps, harm
        if harm == "dtype in the build":
            torch.set_default_dtype(torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.harm == "dtype":
            torch.set_default_dtype(torch.float64)
        logits: Tensor = self.head(self.tokens(tokens)).float()
        self.bad_steps -= 1
        if self.harm in ("detached", "constant"):
            logits = logits.detach().requires_grad_(self.harm == "constant")
        return logits * float("nan") if self.bad_steps >= 0 else logits


@pytest.fixture(autouse=True)
def _settings_as_before() -> Iterator[None]:
    threads, matmul = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(matmul)


def session_of(**values: Any) -> Session:
    given = {"device": "cpu", "model": f"{HERE}:Model", "vocab_size": 101, "context_length": 4}
    params = TrainStepParams.model_validate({**given, "batch_size": 2, **values})
    return Session(build(params), params, Progress())


def checks_of(session: Session) -> StageChecks:
    return StageChecks(session, read_settings())


@pytest.mark.parametrize("optimizer", ["course", "foreach", "fused"])
def test_steps_that_the_gradient_scaler_skips_are_counted_and_allowed_in_warm_up_only(
    optimizer: str,
) -> None:
    session = session_of(precision="fp16", optimizer=optimizer, model_args={"bad_steps": 3})
    checks = checks_of(session)
    session.step()
    session.step()
    checks.check("warm-up")
    assert session.facts == {"optimizer_steps_skipped": 2}
    session.step()
    session.step()
    with pytest.raises(RuntimeError, match="changed nothing in 1 steps of timing synced"):
        checks.check("timing synced")
    assert session.facts == {"optimizer_steps_skipped": 3}


def test_the_first_step_is_warm_up_in_whatever_stage_it_runs() -> None:
    session = session_of(precision="fp16", model_args={"bad_steps": 1})
    checks = checks_of(session)
    session.step()
    session.step()
    checks.check("kernels")
    assert session.facts == {"optimizer_steps_skipped": 1}


def test_a_pass_without_optimizer_has_no_optimizer_steps() -> None:
    session = session_of(**{"pass": "forward_backward"})
    session.step()
    checks_of(session).check("timing synced")
    assert session.facts == {}


def test_a_default_dtype_that_the_model_sets_fails_the_cell() -> None:
    with pytest.raises(RuntimeError, match="float32, but it was set to float64: remove"):
        session_of(model_args={"harm": "dtype in the build"})
    session = session_of(model_args={"harm": "dtype"})
    checks = checks_of(session)
    session.step()
    with pytest.raises(RuntimeError, match=f"remove torch.set_default_dtype from {HERE}"):
        checks.check("warm-up")


def test_another_number_of_threads_fails_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of()
    checks = checks_of(session)
    checks.check("warm-up")
    now = torch.get_num_threads() + 1
    monkeypatch.setattr(precision.torch, "get_num_threads", lambda: now)
    with pytest.raises(RuntimeError, match=f"has {now} now: remove torch.set_num_threads from "):
        checks.check("timing synced")


@pytest.mark.parametrize("pass_", ["forward_grad", "train_step"])
def test_a_loss_without_gradient_fails_the_cell(pass_: str) -> None:
    session = session_of(model_args={"harm": "detached"}, **{"pass": pass_})
    with pytest.raises(RuntimeError, match="the loss has no gradient: check"):
        session.step()


@pytest.mark.parametrize("optimizer", ["foreach", "torch.optim:SGD"])
def test_an_optimizer_without_gradients_fails_the_cell(optimizer: str) -> None:
    session = session_of(model_args={"harm": "constant"}, optimizer=optimizer)
    checks = checks_of(session)
    session.step()
    checks.check("warm-up")
    session.step()
    with pytest.raises(
        RuntimeError, match=r"1 steps of timing synced\. No parameter of the optimizer had"
    ):
        checks.check("timing synced")


class Idle(Optimizer):
    """An optimizer that counts its steps and changes nothing."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1
            self.change(parameter)

    def change(self, parameter: Tensor) -> None:
        """Change nothing."""


class ThroughData(Idle):
    """An optimizer that writes as course code does: torch counts no write to `.data`."""

    def change(self, parameter: Tensor) -> None:
        parameter.data -= 0.1 * parameter.grad  # type: ignore[operator]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"precision": "fp16"},
    {"optimizer_step": "in_backward"},
    {"gradient_accumulation": 2},
    {"model": None, "size": "tiny", "lora": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("optimizer", ["Idle", "ThroughData"])
def test_an_optimizer_that_ran_has_changed_a_parameter(
    optimizer: str, options: dict[str, Any]
) -> None:
    session = session_of(optimizer=f"{HERE}:{optimizer}", **options)
    checks = checks_of(session)
    session.step()
    checks.check("warm-up")
    checks.check("cores before")  # a stage without steps
    session.step()
    if optimizer == "ThroughData":
        checks.check("timing synced")
        return
    with pytest.raises(RuntimeError, match=r"1 steps of timing synced\. It ran, but no param"):
        checks.check("timing synced")


class Tiny(ThroughData):
    """An optimizer whose changes are rounded away in bf16."""

    def change(self, parameter: Tensor) -> None:
        parameter.data -= 1e-12


TINY_STEPS: list[dict[str, Any]] = [
    {"optimizer": "sgd", "optimizer_args": {"lr": 1e-30}},
    {"optimizer": f"{HERE}:Tiny", "precision": "bf16_pure"},
]


@pytest.mark.parametrize("options", TINY_STEPS, ids=str)
def test_steps_too_small_to_be_seen_are_no_missing_work(options: dict[str, Any]) -> None:
    session = session_of(**options)
    checks = checks_of(session)
    for stage in ("warm-up", "timing synced"):
        session.step()
        checks.check(stage)
    assert session.facts["optimizer_steps_skipped"] == 0


def test_only_the_version_of_a_parameter_is_read_where_values_would_need_memory() -> None:
    turned = nn.Parameter(torch.ones(2, 3).t())
    version, values = _state_of(turned)
    assert (version, values.numel()) == (0, 0)
    with torch.no_grad():
        turned += 1
    assert _state_of(turned)[0] == 1


def test_a_setting_that_the_cell_changes_is_recorded() -> None:
    before = read_settings()
    session = session_of()
    StageChecks(session, before).check("warm-up")
    assert "settings_changed" not in session.facts
    with torch.autograd.set_detect_anomaly(True):
        torch.backends.cudnn.benchmark = True
        try:
            StageChecks(session, before).check("timing synced")
        finally:
            torch.backends.cudnn.benchmark = False
    assert session.facts["settings_changed"] == (
        "anomaly mode of torch.autograd False → True, torch.backends.cudnn.benchmark False → True"
    )


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinity is for Linux")
def test_niceness_and_cores_are_settings_of_the_process() -> None:
    values = read_settings()
    assert values["niceness"] == os.nice(0)
    assert values["CPU cores"] == spans(sorted(os.sched_getaffinity(0)))
    assert changed_settings({**values, "niceness": -1}) == f"niceness -1 → {os.nice(0)}"


def make_nothing() -> None:
    """Return what no model is."""


def test_a_factory_that_gives_no_module_fails_the_cell() -> None:
    with pytest.raises(TypeError, match=r"gives a NoneType, where a torch\.nn\.Module is needed"):
        session_of(model=f"{HERE}:make_nothing")


def test_a_factory_that_gives_no_optimizer_fails_the_cell() -> None:
    with pytest.raises(TypeError, match=r"gives a list, where a torch\.optim\.Optimizer is needed"):
        session_of(optimizer="builtins:list")


@pytest.mark.parametrize("axis", ["model", "optimizer", "loss"])
def test_a_string_instead_of_a_class_or_function_fails_the_cell(axis: str) -> None:
    with pytest.raises(TypeError, match=f"{axis}: {HERE}:HERE is a str, where a class or a functi"):
        session_of(**{axis: f"{HERE}:HERE"})


class OneHot(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.one_hot(tokens, 101).float()


def test_a_model_without_parameters_has_an_inference() -> None:
    session = session_of(model=f"{HERE}:OneHot", **{"pass": "forward"})
    session.step()
    assert session.workload.facts["parameters"] == 0
    assert session.workload.facts["parameter_dtype"] is None


def test_the_clock_is_the_one_that_no_model_has_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter_ns", lambda: 0)
    device: Any = SimpleNamespace(synchronize=lambda: None)
    timer = SyncedTimer(device)
    timer.enter("forward")
    timer.leave("forward")
    assert timer.phases["forward"] > 0


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up, self.heads = nn.Linear(width, width), nn.ModuleList([nn.Linear(width, width)])

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.up(hidden)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(4, 1)


class Other(Block):
    pass


BLOCKS: dict[str, tuple[nn.Module, str]] = {
    "gates first": (
        nn.ModuleDict(
            {"gates": nn.ModuleList([Gate(), Gate()]), "h": nn.ModuleList([Block(), Block()])}
        ),
        "h: 2 Block",
    ),
    "large embeddings first": (
        nn.ModuleDict({"e": nn.ModuleList([nn.Embedding(999, 99)]), "h": nn.ModuleList([Block()])}),
        "h: 1 Block",
    ),
    "large heads": (
        nn.ModuleDict({"h": nn.ModuleList([Block()]), "heads": nn.ModuleList([nn.Linear(99, 99)])}),
        "h: 1 Block",
    ),
    "dictionary": (nn.ModuleDict({"0": Block(), "1": Block()}), "model: 2 Block"),
    "sequential": (
        nn.Sequential(nn.Embedding(9, 4), nn.Sequential(Block(), Block())),
        "1: 2 Block",
    ),
    "hybrid": (nn.ModuleList([Block(), Other()]), "model: 2 Block or Other"),
    "list of lists": (
        nn.ModuleList([nn.ModuleList([Gate()]), nn.ModuleList([Block()])]),
        "1: 1 Block",
    ),
    "nothing but a list of layers": (nn.ModuleList([nn.Linear(4, 4)]), "model: 1 Linear"),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_chosen_by_what_they_hold(name: str) -> None:
    model, expected = BLOCKS[name]
    blocks, first = blocks_of(model), first_block(model)
    assert blocks is not None
    assert first is not None
    assert blocks.describe() == expected
    assert model.get_submodule(first[0]) is first[1] is blocks.members[0]


def test_a_model_without_containers_has_no_blocks() -> None:
    assert blocks_of(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True),
        lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU()),
        lambda: Block(8),
    ],
    ids=["layer of torch", "container of torch", "own class"],
)
def test_a_module_is_compiled_in_place_whoever_wrote_it(make: Any) -> None:
    torch._dynamo.reset()
    counters.clear()
    blocks = [make(), make()]
    names = [name for name, _ in blocks[0].named_parameters()]
    for block in blocks:
        compile_module(block, {"backend": "eager", "dynamic": False})
        block(torch.ones(2, 3, 8)).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1  # the second block uses the code of the first
    assert [name for name, _ in blocks[0].named_parameters()] == names
