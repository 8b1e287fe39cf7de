"""What is asked of a predictor and what it answers. JSON throughout, and no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from tasks.spec.axes import Affects, axes_without
from tasks.spec.cell import Cell
from tasks.spec.registry import make_cell
from tasks.spec.tables import Sample

VERSION = 4  # to be raised when the prediction of an unchanged cell would come out differently

_GIB = 1024**3

AS_EAGER, CLOSED_FORM = "as eager", "closed form"
MARGIN = 0.03  # of what a prediction may be off; within it a verdict is borderline

MOST_OVERGUESS = (
    2.11  # of 180 compiled cells that were measured, by a forward pass; of a training step 1.43
)

# Of what is compiled, and predicted as eager, none is `oom`: `perhaps` it fits, or that is `unlikely`.
Verdict = Literal["fits", "borderline", "perhaps", "unlikely", "oom"]


def plainly_fits(reserved: float, requested: float, cap_bytes: int) -> bool | None:
    """Whether an allocator of these peaks comes through under a cap; None where it would first have to give back what it can."""
    return True if reserved <= cap_bytes else False if requested > cap_bytes else None


@dataclass(frozen=True)
class PredictionRequest:
    """A cell, the memory of GPUs that it may have to do with, and what cuBLAS takes there for each thread."""

    cell: Cell
    caps_bytes: tuple[int, ...] = ()
    workspace_bytes: int = 0
    import_paths: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "cell": [self.cell.task, self.cell.params.values()]})

    @classmethod
    def from_json(cls, text: str) -> PredictionRequest:
        body = json.loads(text)
        return cls(
            make_cell(*body["cell"]),
            tuple(body["caps_bytes"]),
            body["workspace_bytes"],
            tuple(body["import_paths"]),
        )


@dataclass(frozen=True)
class Prediction:
    """The peaks as samples named like those that are measured, and whether they fit under each cap.

    how: `tracked`, every storage followed; `modelled`, but for fused kernels, of which a model is; `as eager`, an upper
    guess for what is compiled; `closed form`, where it does not run without data, what its parameters, gradients and AdamW's
    moments take: its peak is unknown, and no less. Empty where nothing is known. `reason` says why there is no peak.
    """

    how: str
    reason: str = ""
    samples: tuple[Sample, ...] = ()
    verdicts: Mapping[int, Verdict] = field(default_factory=dict)  # by the cap in bytes

    def peak_bytes(
        self, metric: str = "peak_allocated_bytes", mode: str = "steady"
    ) -> float | None:
        """The highest of all phases."""
        found = [
            s.value
            for s in self.samples
            if (s.metric, s.mode) == (metric, mode) and s.value is not None
        ]
        return max(found, default=None)

    def plain_verdict(self, cap_bytes: int) -> Verdict | None:
        """What the peaks alone say of a cap: that the allocator need give nothing back, or that to give back all would not do."""
        reserved, requested = (
            [s.value for s in self.samples if s.metric == metric and s.value is not None]
            for metric in ("peak_reserved_bytes", "peak_requested_bytes")
        )
        if not reserved or not requested:
            return None
        low, high = (
            plainly_fits(max(reserved), max(requested), round(cap_bytes * share))
            for share in (1 - MARGIN, 1 + MARGIN)
        )
        return "fits" if low else "oom" if high is False else None

    def as_eager(self) -> Prediction:
        """An upper guess for what is compiled: it may do with less, so that no verdict is `oom`."""
        if self.how in ("", CLOSED_FORM):  # compiled or not, the parameters are there
            return self
        samples = tuple(
            replace(s, note=AS_EAGER) if s.note == self.how else s for s in self.samples
        )
        verdicts = {
            cap: self._compiled(cap) if v == "oom" else v for cap, v in self.verdicts.items()
        }
        return replace(self, how=AS_EAGER, samples=samples, verdicts=verdicts)

    def _compiled(self, cap_bytes: int) -> Verdict:
        """Of what would not fit as eager: whether it took more than was ever seen to be too much."""
        return (
            "unlikely"
            if self.plain_verdict(round(MOST_OVERGUESS * cap_bytes)) == "oom"
            else "perhaps"
        )

    def role_bytes(self, metric: str = "at_peak_bytes") -> dict[str, float]:
        """By role, at the peak that is predicted, or with `closed_form_bytes` by the formula."""
        return {s.note: s.value for s in self.samples if s.metric == metric and s.value is not None}

    def least_bytes(self) -> float | None:
        """What it takes at the least, where its peak is unknown."""
        return (
            sum(self.role_bytes("closed_form_bytes").values()) if self.how == CLOSED_FORM else None
        )

    def samples_with(self, verdict: Verdict | None) -> tuple[Sample, ...]:
        """The samples, and the verdict under the cap that counts."""
        return (
            (*self.samples, Sample("prediction", "verdict", "", None, note=verdict))
            if verdict
            else self.samples
        )

    def why_oom(self, cap_bytes: int | None) -> str:
        least, cap = self.least_bytes(), cap_bytes or 0
        if least is not None:
            return f"its parameters, gradients and moments take {least / _GIB:.1f} GiB, and there are {cap / _GIB:.1f}"
        peak = self.peak_bytes("peak_reserved_bytes") or 0
        return f"it is predicted to reserve {peak / _GIB:.1f} GiB, and there are {cap / _GIB:.1f}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Prediction:
        body = json.loads(text)
        samples = tuple(Sample(**sample) for sample in body["samples"])
        return cls(
            body["how"],
            body["reason"],
            samples,
            {int(cap): verdict for cap, verdict in body["verdicts"].items()},
        )


def unknown(reason: str) -> Prediction:
    return Prediction(
        "",
        reason,
        (Sample("prediction", "peak_allocated_bytes", "bytes", None, "steady", note=reason),),
    )


def unsupported_reason(cell: Cell) -> str:
    """Why a cell is none whose memory is predicted; empty where it is."""
    if cell.task not in ("train_step", "attention"):
        return f"the memory of {cell.task} is not predicted"
    if getattr(cell.params, "cold_l2", False):
        return "how large the buffer is that empties the cache, only the GPU tells"
    if cell.params.device != "cuda":
        return f"on {cell.params.device} the peak is of the whole process, which no model of tensors foretells"
    return ""


def memory_identity(cell: Cell) -> dict[str, Any]:
    """What of a cell decides how much memory it takes: cells that agree in it share a prediction."""
    ignored = axes_without(type(cell.params), Affects.MEMORY)
    values = {name: value for name, value in cell.params.values().items() if name not in ignored}
    if values.get("precision") == "tf32":
        values["precision"] = "fp32"
    return {"task": cell.task, "version": cell.version, **values}
