"""The memory of a training step, or of attention alone, by the formulas of model/accounting.py.

The closed form explains a prediction by terms, and is a lower bound where no prediction is
possible. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from model.accounting import (
    ACTIVATION_FORMULAS,
    ATTENTION_SQUARES,
    BACKWARD_BEGINS,
    BACKWARD_ENDS,
    IN_OPTIMIZER,
    StepKind,
    activation_bytes,
    attention_square_bytes,
    parameter_count,
    peak_moment,
    state_bytes,
    training_moments_bytes,
)
from tasks.attention import AttentionParams
from tasks.spec.metrics import CLOSED_FORM_BYTES
from tasks.spec.tables import Sample
from tasks.training.parameters import TrainStepParams

_NARROW, _WIDE = 2, 4  # bytes of an element: with bf16_pure, and otherwise
# Terms that the ranks share, by strategy.
_SHARDED = {
    "zero1": ("optimizer state",),
    "zero1_torch": ("optimizer state",),
    "fsdp2": ("parameters", "gradients", "optimizer state"),
}
_TEMPORARY = {
    BACKWARD_BEGINS: "2·4·BSV",
    BACKWARD_ENDS: "0",
    IN_OPTIMIZER: "5·4·VD, foreach 4·N, fused 0",
}


@dataclass(frozen=True)
class Term:
    """A term of a formula. name: a role, as at a predicted peak."""

    name: str
    formula: str
    nbytes: int


@dataclass(frozen=True)
class ClosedForm:
    """The memory of a step by formula.

    terms: memory at the peak by role. moments: sums at each moment that may be the peak; empty if
        only the terms of the parameters are known, which are a lower bound.
    """

    terms: tuple[Term, ...]
    moments: tuple[Term, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(term.nbytes for term in self.terms)

    def samples(self) -> Iterator[Sample]:
        for term in self.terms:
            yield CLOSED_FORM_BYTES.sample(term.nbytes, "steady", note=term.name)


def closed_form(params: TrainStepParams) -> ClosedForm | None:
    """Return the closed form, or None for the user's own model and for adapters."""
    dims = params.dimensions
    if dims is None or params.lora:
        return None
    count = parameter_count(dims, params.vocab_size)
    phases = params.phases
    is_plain = params.precision in ("fp32", "tf32") and params.attention == "naive"
    is_plain = is_plain and dims.kv_heads == dims.num_heads and not dims.is_tied
    is_plain = is_plain and params.ranks == 1
    if not (is_plain and _is_textbook_step(params)) or "backward" not in phases:
        return of_parameters(params, count, count)
    shape = (params.batch_size, params.context_length, params.vocab_size)
    moments = training_moments_bytes(dims, *shape, StepKind(phases, params.optimizer))
    peak = peak_moment(moments)
    terms = moments[peak]
    formulas = _state_formulas(params, count)
    if peak == BACKWARD_BEGINS:
        formulas["gradients"] += ", none yet"
    found = [Term(name, formulas[name], terms[name]) for name in formulas]
    if terms["activations"]:
        per = " / L" * (peak != BACKWARD_BEGINS)
        parts = activation_bytes(dims, *shape)
        for part, nbytes in parts.items():
            alive = nbytes * terms["activations"] // sum(parts.values())
            found.append(Term(f"activations: {part}", ACTIVATION_FORMULAS[part] + per, alive))
    found.append(Term("temporary", _TEMPORARY[peak], terms["temporary"]))
    sums = []
    for moment, sizes in moments.items():
        sums.append(Term(moment, _moment_formula(params, moment), sum(sizes.values())))
    return ClosedForm(tuple(found), tuple(sums))


def of_parameters(
    params: TrainStepParams, count: int, trained: int, nbytes: int | None = None
) -> ClosedForm:
    """Return the terms of any model: `trained` of its `count` parameters have gradients.

    nbytes: of the parameters, if their dtypes may be others than the cell's.
    """
    state = state_bytes(count, trained, _holding_phases(params), _element_bytes(params))
    if nbytes is not None:
        state["parameters"] = nbytes
    formulas = _state_formulas(params, count)
    terms = []
    for name, nbytes in state.items():
        if name in _SHARDED.get(params.parallel, ()) and nbytes:
            nbytes //= params.ranks
            formulas[name] += f" / {params.ranks}"
        terms.append(Term(name, formulas[name], nbytes))
    return ClosedForm(tuple(terms))


def attention_squares(params: AttentionParams) -> Iterator[Sample]:
    """Yield the number of squares of attention alone, and the size of one.

    Nothing if autocast mixes dtypes, or if torch chooses the implementation.
    """
    is_one_dtype = params.precision in ("fp32", "tf32", "bf16_pure")
    if params.attention not in ATTENTION_SQUARES or not is_one_dtype:
        return
    shape = (params.batch_size, params.context_length)
    size = attention_square_bytes(params.attention, *shape, _element_bytes(params))
    yield Sample("prediction", "square_bytes", "bytes", size, "steady")
    saved, forward, backward = ATTENTION_SQUARES[params.attention]
    squares = {} if params.pass_ == "forward" else {"saved": saved, "forward": forward}
    if params.pass_ == "forward_backward":
        squares["backward"] = backward
    for what, number in squares.items():
        yield Sample("prediction", f"formula_{what}_squares", "tensors", number, "steady")


def _is_textbook_step(params: TrainStepParams) -> bool:
    """Return True for a step of one micro-batch whose activations are all stored, and AdamW."""
    is_whole = params.checkpointing == "none" and params.gradient_accumulation == 1
    is_adamw = params.optimizer in ("course", "foreach", "fused") and not params.optimizer_args
    return (
        is_whole
        and is_adamw
        and params.optimizer_step == "after"
        and params.loss == "cross_entropy"
    )


def _holding_phases(params: TrainStepParams) -> tuple[str, ...]:
    """Return the phases that leave gradients or AdamW's moments of all parameters in memory."""
    if params.optimizer_step == "in_backward":
        return ("forward",)
    if params.optimizer in ("course", "foreach", "fused", "loop"):
        return params.phases
    return tuple(phase for phase in params.phases if phase != "optimizer")


def _state_formulas(params: TrainStepParams, count: int) -> dict[str, str]:
    size, phases = _element_bytes(params), _holding_phases(params)
    formulas = {"parameters": f"{size}·N, N = {count:,}", "gradients": "0", "optimizer state": "0"}
    if "backward" in phases:
        formulas["gradients"] = f"{size}·N"
    if "optimizer" in phases:
        formulas["optimizer state"] = f"{2 * size}·N"
    return formulas


def _moment_formula(params: TrainStepParams, moment: str) -> str:
    # The optimizer's two moments, in addition to parameters and gradients.
    held = 8 * ("optimizer" in params.phases)
    return {
        BACKWARD_BEGINS: f"{4 + held}·N + A + 2·4·BSV",
        BACKWARD_ENDS: f"{8 + held}·N + A/L",
        IN_OPTIMIZER: "16·N + T",
    }[moment]


def _element_bytes(params: TrainStepParams | AttentionParams) -> int:
    return _NARROW if params.precision == "bf16_pure" else _WIDE
