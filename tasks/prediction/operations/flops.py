"""Count the floating-point operations of a traced step, by the formulas of torch's FLOP counter.

Matrix products and attention count, and a causal mask saves nothing. What the backward pass
computes again is counted separately: checkpoints, and the scores of fused attention. Operations
without a formula are named: those of other packages, such as their own kernels, and products of
torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from tasks.prediction.operations.kernels import ALGEBRA, WITHOUT_PRODUCTS
from tasks.prediction.operations.shapes import Arguments, Keywords, Operation

# Results of `_formula_of` for all operations that were seen, by id because they are slow to hash.
_FORMULAS: dict[int, Callable[..., int] | str | None] = {}
_KNOWN: dict[
    tuple[object, ...], int
] = {}  # FLOPs by operation and shapes: layers repeat each other


_Size = tuple[int, ...]
_COUNTED_PHASES = ("forward", "backward")
# Namespaces of torch's operations: those without a formula are not worth to be counted.
_OF_TORCH = frozenset({"aten", "prims", "prim", "rngprims", "inductor", "profiler", "fsdp"})


# Ends of words in the names of products, and beginnings of the names of what else computes some.
_PRODUCTS = ("mm", "mv", "dot", "trilinear")
_COMPUTED = (*ALGEBRA, "cdist", "cudnn_rnn", "thnn_fused")


def _grouped(a: _Size, b: _Size, *_: object, **__: object) -> int:
    """Count a grouped product: each row of `a`, or each column of `b`, belongs to one group."""
    if len(a) == 3 and len(b) == 2:
        return 2 * math.prod(b) * a[-2]
    return 2 * math.prod(a) * b[-1]


def _of_vector(matrix: _Size, *_: object, **__: object) -> int:
    return 2 * math.prod(matrix)


def _added(_: object, matrix: _Size, *__: object, **___: object) -> int:
    return 2 * math.prod(matrix)


_aten = torch.ops.aten
_MORE: dict[object, Callable[..., int]] = {
    _aten.mv: _of_vector,
    _aten.dot: _of_vector,
    _aten.vdot: _of_vector,
    _aten.addmv: _added,
}
if hasattr(_aten, "_grouped_mm"):
    _MORE[_aten._grouped_mm] = _grouped


class FlopCount:
    """FLOPs of the forward and backward passes of a step, by phase.

    repeated: what a backward pass computes again. unknown: names of operations without a formula.
    """

    def __init__(self) -> None:
        self.once: Counter[str] = Counter()
        self.repeated: Counter[str] = Counter()
        self.unknown: set[str] = set()

    def add(
        self, func: Operation, args: Arguments, kwargs: Keywords, result: object, phase: str
    ) -> None:
        """Count one operation."""
        # Products within an optimizer are no work of the model.
        if phase not in _COUNTED_PHASES:
            return
        if id(func) not in _FORMULAS:
            _FORMULAS[id(func)] = _formula_of(func)
        formula = _FORMULAS[id(func)]
        if formula is None:
            return
        if isinstance(formula, str):
            self.unknown.add(formula)
            return
        # A backward pass computes gradients without recording; a checkpoint in it records again.
        in_backward = torch._C._current_graph_task_id() != -1
        is_repeated = in_backward and torch.is_grad_enabled()
        name, shapes = func.overloadpacket.__name__, _shapes(args)
        if "scaled_dot_product" in name:
            shapes = _of_all_heads(shapes)
        # Generated code passes the result as `out`, which a key would keep alive.
        key = (id(func), *shapes, *kwargs, *_shapes(tuple(kwargs.values())))
        if key not in _KNOWN:
            _KNOWN[key] = formula(*shapes, **kwargs, out_val=result)
        flops = _KNOWN[key]
        if "scaled_dot_product" in name and name.endswith("_backward"):
            # Five products, and one of them repeats the scores of the forward pass.
            self.repeated[phase] += flops // 5
            flops -= flops // 5
        counted = self.repeated if is_repeated else self.once
        counted[phase] += flops


def _formula_of(func: Operation) -> Callable[..., int] | str | None:
    """Return the formula of an operation, or None if it is not worth to be counted.

    If an operation of another package or a product has none, return its name.
    """
    packet, name = func.overloadpacket, func.overloadpacket.__name__
    formula: Callable[..., int] | None = flop_registry.get(packet) or _MORE.get(packet)
    is_of_torch = func.namespace in _OF_TORCH and not _is_product(name)
    return formula if formula is not None or is_of_torch else f"{func.namespace}::{name}"


def _is_product(name: str) -> bool:
    plain = name.strip("_")
    is_product = any(word.endswith(_PRODUCTS) for word in plain.split("_"))
    return plain not in WITHOUT_PRODUCTS and (is_product or plain.startswith(_COMPUTED))


def _shapes(args: Arguments) -> tuple[object, ...]:
    """Return the arguments as keys of a dict, with shapes instead of tensors."""
    found = []
    for arg in args:
        if isinstance(arg, Tensor):
            arg = arg.shape
        found.append(tuple(arg) if isinstance(arg, list) else arg)
    return tuple(found)


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
