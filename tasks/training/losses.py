"""The loss of a training step: of all logits together, in chunks, or as the model computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from model.parts import part
from tasks.harness.device import Skip
from tasks.training.imports import import_named
from tasks.training.parameters import TrainStepParams

# Of 4 to 64 chunks of 8,192 tokens, the peak of Llama-3.2-1B differs only with the fewest.
_CHUNK_TOKENS = 512

# From token ids and targets, both `(batch, context)`, to a scalar.
Loss = Callable[[Tensor, Tensor], Tensor]


def make_loss(params: TrainStepParams, model: nn.Module) -> Loss:
    """Return the loss that the cell names. Raise Skip if the model lacks what it needs."""
    match params.loss:
        case "cross_entropy":
            return CrossEntropy(params, model)
        case "chunked":
            return _Chunked(params, model)
        case "model":
            return partial(_loss_of_model, model)
    return partial(import_named(params.loss, "loss"), model)


class Logits:
    """The model's logits, `(batch, context, vocabulary)`, checked when they are first computed."""

    def __init__(self, params: TrainStepParams, model: nn.Module) -> None:
        self._params = params
        self._model = model
        self._is_checked = False

    def __call__(self, tokens: Tensor) -> Tensor:
        logits = _logits_in(self._model(tokens))
        if not self._is_checked:
            require_logits(logits, self._params)
            self._is_checked = True
        return logits


class CrossEntropy:
    """The mean cross-entropy of all logits."""

    def __init__(self, params: TrainStepParams, model: nn.Module) -> None:
        self._logits = Logits(params, model)

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return mean_loss(self._logits(tokens), targets)


class _Chunked:
    """The mean cross-entropy, with the logits of only one chunk of tokens in memory.

    The model's head is replaced by the identity, so that the model returns hidden states.
    """

    def __init__(self, params: TrainStepParams, model: nn.Module) -> None:
        head = _head_of(model)
        self._model = model
        # Autocast computes the loss in fp32; without it, that is done here.
        self._widens = params.precision == "bf16" and not params.autocasts
        self._project = head.forward
        head.forward = _identity

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = _logits_in(self._model(tokens))
        if not isinstance(hidden, Tensor) or hidden.shape[:-1] != targets.shape:
            expected = f"({', '.join(map(str, targets.shape))}, width)"
            raise ValueError(
                f"the model gives {_described(hidden)} without its head, where loss: chunked needs "
                f"a tensor of {expected}: batch, context, width"
            )
        return self._mean(hidden.flatten(0, 1), targets.flatten())

    @part("loss")
    def _mean(self, hidden: Tensor, targets: Tensor) -> Tensor:
        chunks = zip(
            torch.split(hidden, _CHUNK_TOKENS), torch.split(targets, _CHUNK_TOKENS), strict=True
        )
        sums = [checkpoint(self._sum, *chunk, use_reentrant=False) for chunk in chunks]
        return torch.stack(sums).sum() / targets.numel()

    def _sum(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = self._project(hidden)
        if self._widens:
            logits = logits.float()
        return functional.cross_entropy(logits, targets, reduction="sum")


def _identity(hidden: Tensor) -> Tensor:
    return hidden


def _head_of(model: nn.Module) -> nn.Module:
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if getter is not None else getattr(model, "lm_head", None)
    if not isinstance(head, nn.Module):
        raise Skip(
            "loss: chunked needs the model's head. Define get_output_embeddings() or an attribute "
            "lm_head"
        )
    if getattr(getattr(model, "config", None), "final_logit_softcapping", None):
        raise Skip("loss: chunked cannot be used with this model, which caps its logits")
    return head


def _loss_of_model(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    loss = _member(model(tokens, labels=targets), "loss")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(
            "loss: model needs a model that returns a scalar, or an output with a loss, for "
            f"model(tokens, labels=targets), and this one gives {_described(loss)}"
        )
    return loss


def require_loss(loss: object, name: str) -> None:
    """Raise an error for anything but a tensor with one element that has a gradient.

    name: of the loss, as the cell gives it.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(
            f"loss: {name} gives {_described(loss)}, where a tensor with one element is needed: "
            "return the mean loss of the batch"
        )
    if not loss.requires_grad:
        raise RuntimeError(
            "the loss has no gradient: check whether the model detaches its logits, the loss is "
            "computed with .item() or .detach(), or torch.set_grad_enabled(False) is called"
        )


@part("loss")
def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits `(batch, context, vocabulary)`, a scalar."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _logits_in(output: object) -> Tensor:
    """Return the logits in what a model returns: named so, or the tensor like them in a tuple.

    Of a tuple, it is the first tensor with three dimensions. It is not checked: see
    `require_logits`.
    """
    logits = _member(output, "logits")
    for member in logits if isinstance(logits, tuple) else ():
        if isinstance(member, Tensor) and member.dim() == 3:
            return member
    return logits  # type: ignore[no-any-return]


def _member(output: object, name: str) -> Any:
    """Return `output.name` or `output["name"]`, or the output itself if it has neither."""
    if isinstance(output, Mapping):
        return output.get(name, output)
    return getattr(output, name, output)


def require_logits(logits: object, params: TrainStepParams) -> None:
    """Raise ValueError for anything but a tensor of `(batch, context, vocabulary or more)`.

    Only the shape is checked. A model may pad its vocabulary, so the last dimension may be larger.
    """
    batch, context, vocab = params.rank_batch_size, params.context_length, params.vocab_size
    if isinstance(logits, Tensor) and logits.dim() == 3:
        *sizes, width = logits.shape
        if sizes == [batch, context] and width >= vocab:
            return
    expected = f"({batch}, {context}, {vocab} or more)"
    raise ValueError(
        f"the model gives {_described(logits)}, where logits are a tensor of {expected}: batch, "
        'context, vocabulary. Return them, as .logits of an object, as "logits" of a dict, or in a '
        "tuple"
    )


def _described(value: object) -> str:
    """Return what a model or a loss has given, in words: `a tensor of (2, 16)`, `a tuple`."""
    if value is None:
        return "None"
    if isinstance(value, Tensor):
        return f"a tensor of {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {', '.join(map(str, value)) or 'none'}"
    kind = type(value).__name__
    return f"a {kind}" if type(value).__module__ == "builtins" else f"an object of class {kind}"
