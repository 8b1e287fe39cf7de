"""The memory of a training step, or of attention alone, by the formulas of model/accounting.py.

The closed form explains a prediction by terms, and is a lower bound where no prediction is possible.
Imports no torch.
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
from tasks.spec.tables import Sample
from tasks.training.parameters import PHASES, TrainStepParams

_NARROW, _WIDE = 2, 4  # bytes of an element: with bf16_pure, and otherwise
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

    terms: memory at the peak by role. moments: sums at the moments one of which is the peak; empty if
        only the terms of the parameters are known, which are a lower bound.
    """

    terms: tuple[Term, ...]
    moments: tuple[Term, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(term.nbytes for term in self.terms)

    def samples(self) -> Iterator[Sample]:
        for term in self.terms:
            yield Sample(
                "prediction", "closed_form_bytes", "bytes", term.nbytes, "steady", note=term.name
            )


def closed_form(params: TrainStepParams) -> ClosedForm | None:
    """Return the closed form, or None for the user's own model, whose parameters are unknown here."""
    dims = params.dimensions
    if dims is None:
        return None
    if (
        params.precision not in ("fp32", "tf32")
        or params.attention != "naive"
        or "backward" not in PHASES[params.pass_]
    ):
        count = parameter_count(dims, params.vocab_size)
        return of_parameters(params, count, count)
    shape = (params.batch_size, params.context_length, params.vocab_size)
    moments = training_moments_bytes(dims, *shape, StepKind(PHASES[params.pass_], params.optimizer))
    peak = peak_moment(moments)
    terms, whole = moments[peak], activation_bytes(dims, *shape)
    formulas = _state_formulas(
        params, parameter_count(dims, params.vocab_size), ", none yet" * (peak == BACKWARD_BEGINS)
    )
    found = [Term(name, formulas[name], terms[name]) for name in formulas]
    if terms["activations"]:
        per = "" if peak == BACKWARD_BEGINS else " / L"
        found += [
            Term(
                f"activations: {part}",
                ACTIVATION_FORMULAS[part] + per,
                nbytes * terms["activations"] // sum(whole.values()),
            )
            for part, nbytes in whole.items()
        ]
    found.append(Term("temporary", _TEMPORARY[peak], terms["temporary"]))
    sums = [
        Term(moment, _moment_formula(params, moment), sum(there.values()))
        for moment, there in moments.items()
    ]
    return ClosedForm(tuple(found), tuple(sums))


def of_parameters(params: TrainStepParams, count: int, trained: int) -> ClosedForm:
    """Return the terms of any model with `count` parameters, `trained` of which have gradients."""
    state = state_bytes(count, trained, PHASES[params.pass_], _element_bytes(params))
    formulas = _state_formulas(params, count)
    return ClosedForm(tuple(Term(name, formulas[name], nbytes) for name, nbytes in state.items()))


def attention_squares(params: AttentionParams) -> Iterator[Sample]:
    """Yield the number of squares of attention alone, and the size of one.

    Nothing if autocast mixes dtypes, or if torch chooses the implementation.
    """
    if params.attention not in ATTENTION_SQUARES or params.precision not in (
        "fp32",
        "tf32",
        "bf16_pure",
    ):
        return
    one = attention_square_bytes(
        params.attention, params.batch_size, params.context_length, _element_bytes(params)
    )
    yield Sample("prediction", "square_bytes", "bytes", one, "steady")
    saved, forward, backward = ATTENTION_SQUARES[params.attention]
    learns, goes_back = params.pass_ != "forward", params.pass_ == "forward_backward"
    for what, squares, happens in (
        ("saved", saved, learns),
        ("forward", forward, learns),
        ("backward", backward, goes_back),
    ):
        if happens:
            yield Sample("prediction", f"formula_{what}_squares", "tensors", squares, "steady")


def _state_formulas(params: TrainStepParams, count: int, yet: str = "") -> dict[str, str]:
    size = _element_bytes(params)
    return {
        "parameters": f"{size}·N, N = {count:,}",
        "gradients": f"{size}·N{yet}" if "backward" in PHASES[params.pass_] else "0",
        "optimizer state": f"{2 * size}·N" if "optimizer" in PHASES[params.pass_] else "0",
    }


def _moment_formula(params: TrainStepParams, moment: str) -> str:
    held = 8 if "optimizer" in PHASES[params.pass_] else 0
    return {
        BACKWARD_BEGINS: f"{4 + held}·N + A + 2·4·BSV",
        BACKWARD_ENDS: f"{8 + held}·N + A/L",
        IN_OPTIMIZER: "16·N + T",
    }[moment]


def _element_bytes(params: TrainStepParams | AttentionParams) -> int:
    return _NARROW if params.precision == "bf16_pure" else _WIDE
