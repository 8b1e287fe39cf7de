"""Count the floating-point operations of a traced step, by the formulas of torch's FLOP counter.

Matrix products and attention count, and a causal mask saves nothing. What the backward pass
computes again is counted separately: checkpoints, and the scores of fused attention.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from tasks.prediction.shapes import Arguments, Keywords, Operation


class FlopCount:
    """FLOPs of a step by phase. repeated: what a backward pass computes again."""

    def __init__(self) -> None:
        self.once: Counter[str] = Counter()
        self.repeated: Counter[str] = Counter()

    def add(
        self, func: Operation, args: Arguments, kwargs: Keywords, result: object, phase: str
    ) -> None:
        """Count one operation."""
        formula = flop_registry.get(func.overloadpacket)
        if formula is None or not phase:
            return
        # A backward pass computes gradients without recording; a checkpoint in it records again.
        in_backward = torch._C._current_graph_task_id() != -1
        is_repeated = in_backward and torch.is_grad_enabled()
        name, shapes = func.overloadpacket.__name__, _shapes(args)
        if "scaled_dot_product" in name:
            shapes = _of_all_heads(shapes)
        flops = formula(*shapes, **kwargs, out_val=result)
        if "scaled_dot_product" in name and name.endswith("_backward"):
            # Five products, and one of them repeats the scores of the forward pass.
            self.repeated[phase] += flops // 5
            flops -= flops // 5
        counted = self.repeated if is_repeated else self.once
        counted[phase] += flops


def _shapes(args: Arguments) -> tuple[object, ...]:
    return tuple(arg.shape if isinstance(arg, Tensor) else arg for arg in args)


def _of_all_heads(shapes: tuple[object, ...]) -> tuple[object, ...]:
    """Return the shapes with as many heads of keys and values as of queries, which formulas need."""
    large = [shape for shape in shapes if isinstance(shape, torch.Size) and len(shape) == 4]
    heads = max(shape[1] for shape in large)
    expanded = []
    for shape in shapes:
        if isinstance(shape, torch.Size) and len(shape) == 4:
            shape = torch.Size((shape[0], heads, *shape[2:]))
        expanded.append(shape)
    return tuple(expanded)
