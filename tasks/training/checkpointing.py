"""Activation checkpointing of a model's blocks: the backward pass computes activations again.

The blocks are those of `compile: blocks`. The checkpoint of a block is compiled with it, because
the compiler must know which results to store; a checkpoint of several blocks is around them.
No module is replaced, so that parameters keep their names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tasks.harness.device import Skip
from tasks.harness.model_parts import blocks_of
from tasks.training.parameters import TrainStepParams

_aten = torch.ops.aten
_checkpoint: Callable[..., object] = checkpoint  # which takes the keywords of any function
# Overloads, because a policy is called with these: packets such as `aten.mm` never match
# (pytorch issue 176065).
_LINEAR = frozenset({_aten.mm.default, _aten.addmm.default})
# Written-out attention multiplies in batches.
_ATTENTION = frozenset(
    {
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)


def checkpoint_blocks(model: nn.Module, params: TrainStepParams) -> None:
    """Make the backward pass compute again what the cell's `checkpointing` names.

    Raise Skip if the model has no blocks.
    """
    how = params.checkpointing
    if how == "none":
        return
    blocks = blocks_of(model)
    if blocks is None:
        raise Skip(
            f"checkpointing: {how} needs blocks in a torch.nn.ModuleList, and this model has none"
        )
    kind, _, number = how.partition(":")
    if kind == "groups":
        for start in range(0, len(blocks.members), int(number)):
            _checkpoint_group(blocks.members[start : start + int(number)])
        return
    options = {}
    if kind == "selective":
        options["context_fn"] = partial(_selective_contexts, int(number or 1))
    for block in blocks.members:
        block.forward = _checkpointed(block.forward, options)


def _checkpointed(
    call: Callable[..., object], options: Mapping[str, object]
) -> Callable[..., object]:
    # A function, and not a partial of torch's: torch does not trace frames of its files.
    def run(*args: object, **kwargs: object) -> object:
        return _checkpoint(call, *args, use_reentrant=False, **options, **kwargs)

    return run


def _selective_contexts(stored_every: int) -> object:
    """Return the contexts of one checkpoint that stores matrix products and attention.

    stored_every: 1 stores all products with a weight, 2 every second one (torchtitan's default).
    """
    # The forward pass and its recomputation must make the same decisions, so each counts for itself.
    counts: Counter[bool] = Counter()

    def policy(
        context: SelectiveCheckpointContext, operation: object, *args: object, **kwargs: object
    ) -> CheckpointPolicy:
        is_stored = operation in _ATTENTION
        if operation in _LINEAR:
            is_stored = counts[context.is_recompute] % stored_every == 0
            counts[context.is_recompute] += 1
        if is_stored:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


@dataclass
class _Group:
    """Neighbouring blocks in one checkpoint, which runs when the last of them is called.

    calls: the other blocks that were called in this forward pass, with their further arguments.
    """

    calls: list[Callable[[Tensor], Tensor]] = field(default_factory=list)
    entered: Tensor | None = None

    def postpone(
        self, call: Callable[..., Tensor], x: Tensor, *args: object, **kwargs: object
    ) -> Tensor:
        """Note the call of a block, and return its input instead of its output."""
        self._require_unchanged(x)
        self.entered = x
        self.calls.append(lambda hidden: call(hidden, *args, **kwargs))
        return x

    def run(
        self, call: Callable[..., Tensor], x: Tensor, *args: object, **kwargs: object
    ) -> object:
        """Run all calls of the group in one checkpoint."""
        self._require_unchanged(x)
        calls = (*self.calls, lambda hidden: call(hidden, *args, **kwargs))
        self.calls.clear()
        self.entered = None
        return checkpoint(_run_in_turn, calls, x, use_reentrant=False)

    def _require_unchanged(self, x: object) -> None:
        is_expected = isinstance(x, Tensor) if self.entered is None else x is self.entered
        if not is_expected:
            raise RuntimeError(
                "checkpointing: groups:K needs blocks that map one tensor to one tensor, each the "
                "input of the next one. Use checkpointing: blocks"
            )


def _run_in_turn(calls: tuple[Callable[[Tensor], Tensor], ...], x: Tensor) -> Tensor:
    for call in calls:
        x = call(x)
    return x


def _checkpoint_group(members: tuple[nn.Module, ...]) -> None:
    group = _Group()
    for block in members:
        enter = group.run if block is members[-1] else group.postpone
        if block._compiled_call_impl is None:
            block.forward = partial(enter, block.forward)
        else:
            block._compiled_call_impl = partial(enter, block._compiled_call_impl)
