"""Options of a training step: gradients stay what they were, and a step counts what it computes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils.checkpoint import DefaultDeviceType
from torch.utils.flop_counter import FlopCounterMode

from tasks.harness.device import CpuDevice, Skip
from tasks.harness.workload import Workload, run_step
from tasks.instruments.memory import PeakWatcher
from tasks.instruments.timing import SyncedTimer
from tasks.process.phase_file import Progress
from tasks.spec.registry import make_cell
from tasks.train_step import build
from tasks.training import losses
from tasks.training.imports import import_named
from tasks.training.parameters import TrainStepParams

SMALL: dict[str, Any] = {
    "device": "cpu", "d_model": 32, "d_ff": 64, "num_layers": 5, "num_heads": 4,
    "context_length": 16, "batch_size": 2, "vocab_size": 100, "optimizer": "fused",
}  # fmt: skip


def built(**values: Any) -> Workload:
    return build(TrainStepParams.model_validate(SMALL | values))


def gradients(workload: Workload) -> dict[str, Tensor]:
    """Return the gradients of one step by the names of parameters."""
    workload.step(lambda name: nullcontext())
    assert workload.model is not None
    found = {}
    for name, parameter in workload.model.named_parameters():
        assert parameter.grad is not None
        found[name] = parameter.grad.clone()
    return found


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums of several threads differ in their last digits, with or without checkpoints."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache  # those without checkpoints are compared with all others
def checkpointed_gradients(how: str, attention: str, precision: str) -> dict[str, Tensor]:
    values = {"attention": attention, "precision": precision, "pass": "forward_backward"}
    with one_thread():
        return gradients(built(**values, checkpointing=how))


@pytest.mark.parametrize("how", ["blocks", "groups:2", "groups:9", "selective", "selective:2"])
@pytest.mark.parametrize(
    ("precision", "attention"),
    [
        ("fp32", "naive"),
        ("bf16", "sdpa"),
        pytest.param("fp32", "sdpa", marks=pytest.mark.slow),
        pytest.param("bf16", "naive", marks=pytest.mark.slow),
    ],
)
def test_checkpoints_leave_every_gradient_equal_to_the_bit(
    how: str, attention: str, precision: str
) -> None:
    plain = checkpointed_gradients("none", attention, precision)
    again = checkpointed_gradients(how, attention, precision)
    assert plain.keys() == again.keys()
    assert all(torch.equal(plain[name], again[name]) for name in plain)


@pytest.mark.parametrize(
    ("how", "runs"), [("none", 5), ("blocks", 10), ("groups:2", 10), ("selective", 10)]
)
def test_checkpoints_run_the_blocks_again(how: str, runs: int) -> None:
    workload = built(checkpointing=how)
    assert workload.model is not None
    calls: list[str] = []
    for name, module in workload.model.named_modules():
        if name.endswith("ffn"):
            module.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    workload.step(lambda name: nullcontext())
    assert len(calls) == runs


def test_a_checkpoint_on_the_cpu_may_initialise_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Initialise CUDA, like compiling in the first forward pass on a host with a GPU."""
    monkeypatch.setattr(DefaultDeviceType, "_default_device_type", "cuda")
    monkeypatch.setattr(torch.cuda, "_initialized", False)
    workload = built(checkpointing="groups:2", **{"pass": "forward_backward"})
    assert workload.model is not None
    block = dict(workload.model.named_modules())["layers.0.ffn"]
    block.register_forward_pre_hook(lambda *_: setattr(torch.cuda, "_initialized", True))
    assert gradients(workload)
    assert torch.cuda._initialized


def test_selective_checkpoints_do_not_repeat_matrix_products() -> None:
    def flops(how: str) -> int:
        workload = built(checkpointing=how)
        with FlopCounterMode(display=False) as counter:
            workload.step(lambda name: nullcontext())
        return counter.get_total_flops()

    plain = flops("none")
    assert plain == flops("selective") < flops("selective:2") < flops("blocks") < 4 / 3 * plain


def own(factory: str, **values: Any) -> dict[str, Any]:
    """Return the parameters of a model in this module."""
    widths = dict.fromkeys(("d_model", "d_ff", "num_layers", "num_heads"))
    return {**widths, "model": f"{__name__}:{factory}", **values}


class Pairs(nn.Module):
    """A model whose blocks return tuples, or have something between them."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.how, self.embed = how, nn.Embedding(100, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x) if self.how == "plain" else x + block(x)
        return x @ self.embed.weight.T  # type: ignore[no-any-return]


def test_groups_of_blocks_with_something_between_them_are_refused() -> None:
    grouped = own("Pairs", checkpointing="groups:2")
    gradients(built(**grouped))
    workload = built(**grouped, model_args={"how": "residual"})
    with pytest.raises(RuntimeError, match="needs blocks that map one tensor to one tensor"):
        workload.step(lambda name: nullcontext())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"checkpointing": "blocks"}, "checkpointing: blocks needs blocks in a torch.nn.Module"),
        ({"compile": "blocks"}, "compile: blocks needs a torch.nn.ModuleList, ModuleDict or Seq"),
        ({"optimizer": "muon"}, "optimizer: muon needs blocks in a torch.nn.ModuleList, and this"),
        ({"lora": 2}, "lora needs torch.nn.Linear layers in blocks, and this model has none"),
    ],
)
def test_a_model_without_blocks_is_skipped(values: dict[str, Any], message: str) -> None:
    with pytest.raises(Skip, match=message):
        built(**own("Labelled", **values))


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, in its tracer
@pytest.mark.parametrize("compiled", ["blocks", "model"])
@pytest.mark.parametrize("how", ["groups:2", "selective"])
def test_compiled_models_can_be_checkpointed(how: str, compiled: str) -> None:
    values = {"num_layers": 2, "pass": "forward_backward"}
    plain = gradients(built(**values))
    again = gradients(built(**values, checkpointing=how, compile=compiled))
    for name, gradient in plain.items():
        assert torch.allclose(gradient, again[name], atol=1e-6)


def test_four_micro_batches_have_the_gradients_of_one_batch_of_all() -> None:
    shape = {"pass": "forward_backward", "batch_size": 8}
    whole = gradients(built(**shape))
    parts = gradients(built(**shape | {"batch_size": 2, "gradient_accumulation": 4}))
    for name, gradient in whole.items():
        assert torch.allclose(gradient, parts[name], atol=1e-5 * float(gradient.abs().max()))


def test_a_step_of_several_micro_batches_counts_all_of_them() -> None:
    one, four = built(), built(gradient_accumulation=4)
    assert one.flops is not None
    assert four.flops == {phase: 4 * flops for phase, flops in one.flops.items()}
    assert (four.tokens, four.phases) == (4 * 2 * 16, one.phases)
    runs: list[str] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        runs.append(name)
        yield

    four.step(phase)
    assert runs == ["forward", "backward"] * 4 + ["optimizer"]
    assert four.optimizer_steps is not None
    assert four.optimizer_steps() == 1


class FakeDevice(CpuDevice):
    """A device with given peaks."""

    def __init__(self, *peaks: int) -> None:
        self._peaks = iter(peaks)

    def peaks(self) -> dict[str, int | None]:
        return {"peak_rss_bytes": next(self._peaks)}

    def held(self) -> dict[str, int | None]:
        return {"held_rss_bytes": 1}


def test_instruments_sum_times_and_join_peaks_of_the_micro_batches() -> None:
    workload = built(gradient_accumulation=2, **{"pass": "forward_backward"})
    timer, memory = SyncedTimer(workload.device), PeakWatcher(FakeDevice(5, 7, 9, 6), "steady")
    run_step(workload, Progress(), timer, memory)
    assert list(timer.phases) == ["forward", "backward"]
    peaks = [(one.phase, one.value) for one in memory.samples if one.metric == "peak_rss_bytes"]
    assert peaks == [("forward", 9), ("backward", 7)]


IDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"checkpointing": "groups:1"}, {"checkpointing": "blocks"}),
    ({"checkpointing": "blocks", "pass": "forward"}, {"pass": "forward"}),
    ({"gradient_accumulation": 4, "pass": "forward"}, {"pass": "forward"}),
    ({"checkpointing": "none", "gradient_accumulation": 1}, {}),
    ({"loss": "chunked", "pass": "forward"}, {"pass": "forward"}),
    (
        {"optimizer_step": "in_backward", "pass": "forward_backward"},
        {"pass": "forward_backward"},
    ),
]


@pytest.mark.parametrize(("values", "same"), IDS, ids=str)
def test_values_that_mean_the_same_are_one_cell(
    values: dict[str, Any], same: dict[str, Any]
) -> None:
    ids = {make_cell("train_step", {"size": "tiny", **one}).id for one in (values, same)}
    assert len(ids) == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gradient_accumulation": 4, "pass": "forward_grad"}, "needs a backward pass"),
        ({"checkpointing": "every:2"}, "checkpointing"),
        ({"gradient_accumulation": 0}, "gradient_accumulation"),
        ({"model_args": {"depth": 2}}, "model_args are of a model of your own: name it with model"),
        (own("Pairs", attention="flash"), "attention is of the course's model: yours computes its"),
        ({"num_heads": 3}, "d_model 32 is not divisible by num_heads 3"),
        ({"num_heads": 32}, "d_model / num_heads is 1: RoPE rotates pairs, so it must be even"),
    ],
)
def test_combinations_that_make_no_sense_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainStepParams.model_validate(SMALL | values)


class Output:
    """What models of transformers return."""

    def __init__(self, logits: Tensor, loss: Tensor | None) -> None:
        self.logits, self.loss = logits, loss


class Labelled(nn.Module):
    """A model that computes its own loss for labels, and names its head by a method."""

    def __init__(self, returns: str = "object") -> None:
        super().__init__()
        self.returns = returns
        self.embed, self.head = nn.Embedding(100, 8), nn.Linear(8, 100)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(self.embed(tokens))
        loss = None if labels is None else 2 * losses.mean_loss(logits, labels)
        match self.returns:
            case "object":
                return Output(logits, loss)
            case "dict":
                return {"loss": loss, "logits": logits}
            case "loss first":
                return logits.mean(), logits
            case "nothing":
                return None
        return logits, loss


def double_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return 2 * losses.mean_loss(model(tokens).logits, targets)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("returns", ["", "object", "tuple", "dict", "loss first"])
def test_a_loss_in_chunks_has_the_gradients_of_all_logits(returns: str, precision: str) -> None:
    """Compare the built-in model with models that return their logits in different forms."""
    model = own("Labelled", model_args={"returns": returns}) if returns else {}
    shape = {**model, "context_length": 300, "pass": "forward_backward", "precision": precision}
    whole, chunked = gradients(built(**shape)), gradients(built(**shape, loss="chunked"))
    for name, gradient in whole.items():
        tolerance = (1e-5 if precision == "fp32" else 2e-2) * float(gradient.abs().max())
        assert torch.allclose(gradient, chunked[name], atol=tolerance)


@pytest.mark.parametrize(
    ("loss", "returns"),
    [("model", "object"), ("model", "dict"), (f"{__name__}:double_loss", "object")],
)
def test_the_loss_of_a_model_or_of_a_function_is_used(loss: str, returns: str) -> None:
    model = own("Labelled", model_args={"returns": returns}, **{"pass": "forward_backward"})
    plain, doubled = gradients(built(**model)), gradients(built(**model, loss=loss))
    for name, gradient in plain.items():
        assert torch.allclose(2 * gradient, doubled[name])


def pair(model: nn.Module, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return model(tokens).logits, targets


NO_LOSSES: list[tuple[object, str]] = [
    (None, "None"),
    (1.5, "a float"),
    (torch.ones(2, 3), "a tensor of (2, 3)"),
    ({"all": 1}, "a dict with the keys all"),
    (Output(torch.ones(1), None), "an object of class Output"),
]


@pytest.mark.parametrize(("loss", "given"), NO_LOSSES)
def test_a_value_that_is_no_usable_loss_is_named_in_the_error(loss: object, given: str) -> None:
    message = f"loss: own:loss gives {given}, where a tensor with one element is needed"
    with pytest.raises(ValueError, match=re.escape(message)):
        losses.require_loss(loss, "own:loss")
    with pytest.raises(RuntimeError, match="the loss has no gradient"):
        losses.require_loss(torch.ones(()), "own:loss")


def test_a_step_names_what_is_no_loss() -> None:
    values = own("Labelled", loss=f"{__name__}:pair", gradient_accumulation=2)
    with pytest.raises(ValueError, match="pair gives a tuple, where a tensor with one element is"):
        built(**values).step(lambda name: nullcontext())


def test_a_loss_in_chunks_names_what_are_no_hidden_states() -> None:
    workload = built(**own("Labelled", model_args={"returns": "nothing"}, loss="chunked"))
    with pytest.raises(ValueError, match="the model gives None without its head, where loss: chu"):
        workload.step(lambda name: nullcontext())


class Few(nn.Module):
    """A model whose embedding has fewer rows than its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(100, 8), nn.Linear(8, 5000)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.embed(tokens))  # type: ignore[no-any-return]


@pytest.mark.parametrize("options", [{}, {"loss": "chunked"}, {"pass": "forward"}], ids=str)
def test_an_embedding_with_too_few_rows_names_the_axes_that_decide_them(
    options: dict[str, Any],
) -> None:
    workload = built(**own("Few", vocab_size=5000, context_length=16, **options))
    message = r"an embedding has fewer rows than .* \(vocab_size 5000\) or .* \(context_length 16\)"
    with pytest.raises(IndexError, match=message):
        workload.step(lambda name: nullcontext())


def test_a_loss_that_the_model_lacks_is_named() -> None:
    with pytest.raises(
        Skip, match=r"loss: chunked needs the model's head. Define get_output_embed"
    ):
        built(**own("Pairs", loss="chunked"))
    workload = built(**own("Labelled", model_args={"returns": "tuple"}, loss="model"))
    with pytest.raises(ValueError, match="loss: model needs a model that returns a scalar"):
        workload.step(lambda name: nullcontext())


def parameters_after(steps: int, **values: Any) -> dict[str, Tensor]:
    workload = built(**values)
    assert workload.model is not None
    for _ in range(steps):
        workload.step(lambda name: nullcontext())
    return dict(workload.model.named_parameters())


@pytest.mark.parametrize("optimizer", ["fused", "foreach", "loop", "sgd", "adafactor"])
def test_a_step_within_the_backward_pass_updates_as_one_after_it(optimizer: str) -> None:
    with one_thread():
        after = parameters_after(3, optimizer=optimizer)
        within = parameters_after(3, optimizer=optimizer, optimizer_step="in_backward")
    for name, parameter in after.items():
        assert torch.equal(parameter, within[name])
        assert within[name].grad is None


def test_a_step_within_the_backward_pass_has_no_phase_of_the_optimizer() -> None:
    workload = built(optimizer_step="in_backward")
    assert workload.phases == ("forward", "backward")
    workload.step(lambda name: nullcontext())
    assert workload.optimizer_steps is not None
    assert workload.optimizer_steps() == 1


@pytest.mark.parametrize("optimizer", ["sgd", "adafactor", "muon", "torch.optim:Adagrad"])
def test_steps_of_every_optimizer_are_counted(optimizer: str) -> None:
    workload = built(optimizer=optimizer)
    for _ in range(3):
        workload.step(lambda name: nullcontext())
    assert workload.optimizer_steps is not None
    assert workload.optimizer_steps() == 3


def test_muon_takes_the_matrices_of_the_blocks() -> None:
    workload = built(optimizer="muon", optimizer_args={"momentum": 0.5})
    assert workload.model is not None
    muon, adamw = (one.param_groups[0]["params"] for one in workload.optimizers)
    names = {id(parameter): name for name, parameter in workload.model.named_parameters()}
    assert {names[id(one)] for one in adamw} == {
        name for name in names.values() if "layers" not in name or ".ln" in name
    }
    assert len(muon) == 5 * 7
    assert workload.optimizers[0].param_groups[0]["momentum"] == 0.5


class Frozen(Labelled):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


def test_a_frozen_model_can_be_measured_in_inference() -> None:
    workload = built(**own("Frozen", **{"pass": "forward"}))
    workload.step(lambda name: nullcontext())
    assert (workload.optimizers, workload.facts["parameters_trained"]) == ((), 0)


def test_an_optimizer_that_is_not_installed_is_named() -> None:
    with pytest.raises(
        ModuleNotFoundError, match="optimizer: there is no module 'no_such_package'"
    ):
        built(optimizer="no_such_package.optim:AdamW8bit")
    with pytest.raises(AttributeError, match="NoSuch"):
        built(optimizer="torch.optim:NoSuch")


SCRIPTS = {
    "arguments": "import argparse\np = argparse.ArgumentParser()\np.add_argument('--data', required=True)\np.parse_args()",
    "exit": "import sys\nsys.exit('trained')",
    "quit": "raise SystemExit",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_that_ends_the_process_when_it_is_imported_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"script_{name}.py").write_text(SCRIPTS[name])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sys.argv", ["train"])
    message = rf"model: importing script_{name} ended the process \(SystemExit"
    with pytest.raises(ImportError, match=message) as refused:
        import_named(f"script_{name}:GPT", "model")
    assert "move GPT to a module without it" in str(refused.value)


def test_adapters_change_nothing_at_first_and_are_all_that_is_trained() -> None:
    plain, adapted = built(), built(lora=4)
    assert plain.model is not None
    assert adapted.model is not None
    tokens = torch.arange(16)[None]
    torch.testing.assert_close(adapted.model(tokens).shape, plain.model(tokens).shape)
    blocks = adapted.model.layers
    assert isinstance(blocks, nn.ModuleList)
    query = blocks[0].attn.q_proj  # type: ignore[union-attr]
    x = torch.randn(3, 32)
    assert torch.equal(query(x), query.base(x))  # type: ignore[operator, union-attr]
    trained = {name for name, one in adapted.model.named_parameters() if one.requires_grad}
    assert len(trained) == 5 * 7 * 2
    assert all("lora_" in name for name in trained)
    widths = 4 * (32 + 32) + 3 * (32 + 64)
    assert adapted.facts["parameters_trained"] == 5 * 4 * widths
    assert adapted.flops is None
    before = query.lora_b.clone()  # type: ignore[operator, union-attr]
    adapted.step(lambda name: nullcontext())
    assert not torch.equal(query.lora_b, before)  # type: ignore[arg-type, union-attr]


def test_a_model_without_linear_layers_in_blocks_has_no_adapters() -> None:
    with pytest.raises(Skip, match=r"lora needs torch\.nn\.Linear layers in blocks"):
        built(**own("Labelled", lora=4))
    assert built(**own("Pairs", lora=4)).facts["parameters_trained"] == 2 * 4 * 16


@pytest.mark.parametrize("attention", ["naive", "sdpa"])
def test_grouped_heads_and_a_tied_head_train(attention: str) -> None:
    workload = built(num_kv_heads=2, tie_embeddings=True, attention=attention)
    assert workload.model is not None
    assert workload.facts["parameters"] == workload.facts["parameters_expected"]
    assert workload.model.lm_head.weight is workload.model.token_embeddings.weight  # type: ignore[union-attr]
    found = gradients(workload)
    assert found["layers.0.attn.k_proj.weight"].shape == (16, 32)
    assert "lm_head.weight" not in found


def test_a_named_model_has_its_vocabulary_unless_one_is_given() -> None:
    def vocabulary(**values: Any) -> int:
        return TrainStepParams.model_validate({"size": "smollm2-135m", **values}).vocab_size

    assert (vocabulary(), vocabulary(vocab_size=100)) == (49_152, 100)
    assert TrainStepParams.model_validate({"size": "tiny"}).vocab_size == 10_000
