"""Requests to a predictor and its predictions, as JSON. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from tasks.spec.axes import Affects, axes_without
from tasks.spec.cell import Cell
from tasks.spec.metrics import VERDICT
from tasks.spec.registry import make_cell
from tasks.spec.source_digest import HUB
from tasks.spec.tables import Sample

_GIB = 1024**3

COMPILED, AS_BLOCKS, CLOSED_FORM = "compiled", "as blocks", "closed form"
INCOMPLETE = "may take more"
AS_EAGER, MAY_TAKE_MORE = "as eager", "as eager, may take more"
MARGIN = 0.03  # error of a prediction as a fraction; within it a verdict is borderline

# Largest ratio of predicted to measured memory of 180 compiled cells, in a forward pass. The
# largest of a training step was 1.43. It matters for those compiled cells whose code is not
# generated: they are predicted as eager ones.
MOST_OVERGUESS = 2.11
# Within 10% of the limit, a compiled cell that may take more than predicted fits `perhaps`.
_MARGIN_AS_EAGER = 1.1

# A compiled cell that is predicted as eager is never `oom`, because it usually needs less than
# that: instead it fits `perhaps`, or that is `unlikely`.
Verdict = Literal["fits", "borderline", "perhaps", "unlikely", "oom"]


def plainly_fits(reserved: float, requested: float, cap_bytes: int) -> bool | None:
    """Return if these peaks fit under a limit; None if that depends on releasing free segments."""
    if reserved <= cap_bytes:
        return True
    return False if requested > cap_bytes else None


@dataclass(frozen=True)
class PredictionRequest:
    """A cell to predict.

    caps_bytes: memory limits to judge. workspace_bytes: workspace of cuBLAS per thread on that GPU.
    import_paths: where the user's own model is imported from. capability: of the GPU's choice of
    attention kernels, see `attention_capability`.
    """

    cell: Cell
    caps_bytes: tuple[int, ...] = ()
    workspace_bytes: int = 0
    import_paths: tuple[str, ...] = ()
    capability: float = 9.0

    @property
    def foreign_code(self) -> tuple[str, ...]:
        """The model, optimizer and loss that are no part of this program, torch or transformers."""
        values = self.cell.params.values()
        named = [str(values.get(name)) for name in ("model", "optimizer", "loss")]
        return tuple(
            name for name in named if ":" in name and not name.startswith((HUB, "torch.optim:"))
        )

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "cell": [self.cell.task, self.cell.params.values()]})

    @classmethod
    def from_json(cls, text: str) -> PredictionRequest:
        body = json.loads(text)
        task, values = body.pop("cell")
        caps, paths = tuple(body.pop("caps_bytes")), tuple(body.pop("import_paths"))
        return cls(make_cell(task, values), caps, import_paths=paths, **body)


@dataclass(frozen=True)
class Prediction:
    """Predicted peaks, as samples with the names of measured ones, and a verdict for each limit.

    how: how it was predicted. `tracked`: every storage was followed. `modelled`: the same, with a
        model of fused kernels. `compiled`: every storage of the code that torch's compiler generates
        was followed. `as blocks`: the same for compiled blocks, where the model is compiled as a
        whole. `as eager`: an upper bound for most compiled cells. `as eager, may take more`: for
        the others. `may take more`: every storage was followed, but not the memory of some kernels, or
        of later steps.
        `closed form`: memory of parameters, gradients and AdamW's moments, a lower
        bound for a model that does not run without data. Empty: nothing is known.
    reason: why there is no peak, or why a compiled cell is predicted as eager.
    verdicts: by limit, in bytes.
    module_bytes: of `Trace`, and what is temporary at the peak, by part. They say which module and
        operation a change made larger.
    """

    how: str
    reason: str = ""
    samples: tuple[Sample, ...] = ()
    verdicts: Mapping[int, Verdict] = field(default_factory=dict)
    module_bytes: Mapping[str, int] = field(default_factory=dict)

    def _peak(self, metric: str, *modes: str) -> float | None:
        peak = None
        for sample in self.samples:
            is_in_modes = not modes or sample.mode in modes
            if sample.metric == metric and is_in_modes and sample.value is not None:
                peak = max(peak or 0, sample.value)
        return peak

    def peak_bytes(
        self, metric: str = "peak_allocated_bytes", mode: str = "steady"
    ) -> float | None:
        """Return the highest peak of all phases."""
        return self._peak(metric, mode)

    @property
    def reserved_bytes(self) -> float | None:
        """The most memory that the allocator reserves, in any step."""
        return self._peak("peak_reserved_bytes")

    def plain_verdict(self, cap_bytes: int) -> Verdict | None:
        """Return `fits` or `oom` if the peaks alone decide it, without a replay."""
        reserved = self.reserved_bytes
        # The second step of several ranks may need less than predicted.
        requested = self._peak("peak_requested_bytes", "built", "first", "steady")
        if reserved is None or requested is None:
            return None
        if plainly_fits(reserved, requested, round(cap_bytes * (1 - MARGIN))):
            return "fits"
        is_over = plainly_fits(reserved, requested, round(cap_bytes * (1 + MARGIN))) is False
        return "oom" if is_over else None

    def of_cell(self, cell: Cell) -> Prediction:
        """Return the prediction of a cell from that of the cell that was predicted instead."""
        how = cell.params.values().get("compile", "eager")
        if how == "eager":
            return self
        if self.how == COMPILED:
            return self if how == "blocks" or _compiles_whole(cell) else self._as_blocks()
        return self._as_eager(*_why_as_eager(cell))

    def _as_blocks(self) -> Prediction:
        """Return the prediction of a whole model from that of its blocks: with twice the margin."""
        verdicts = dict(self.verdicts)
        for cap_bytes, verdict in self.verdicts.items():
            limits = {"fits": cap_bytes / (1 + MARGIN), "oom": cap_bytes * (1 + MARGIN)}
            if verdict in limits and self.plain_verdict(round(limits[verdict])) != verdict:
                verdicts[cap_bytes] = "borderline"
        return replace(self._named(AS_BLOCKS), verdicts=verdicts)

    def without(self, names: Iterable[str]) -> Prediction:
        """Return the prediction of a cell that runs kernels whose memory is not known."""
        named = ", ".join(sorted(names))
        if not named:
            return self
        reason = f"kernels of CUDA's libraries have memory of unknown size: {named}"
        reason = "; ".join(filter(None, (reason, self.reason)))
        verdicts = {cap: self._unless_close(cap, verdict) for cap, verdict in self.verdicts.items()}
        return replace(self._named(INCOMPLETE), reason=reason, verdicts=verdicts)

    def with_caveats(self, caveats: Collection[str]) -> Prediction:
        """Return the prediction of a cell whose later steps may take more: it never surely fits."""
        if not caveats:
            return self
        verdicts: dict[int, Verdict] = {
            cap: "perhaps" if verdict == "fits" else verdict
            for cap, verdict in self.verdicts.items()
        }
        reason = "; ".join(filter(None, (*sorted(caveats), self.reason)))
        return replace(self._named(INCOMPLETE), reason=reason, verdicts=verdicts)

    def _unless_close(self, cap_bytes: int, verdict: Verdict) -> Verdict:
        """Return `perhaps` instead of `fits` within 10% of the limit."""
        is_far_below = self.plain_verdict(round(cap_bytes / _MARGIN_AS_EAGER)) == "fits"
        return "perhaps" if verdict == "fits" and not is_far_below else verdict

    def with_eager_functions(self, names: Iterable[str]) -> Prediction:
        """Return the prediction of a cell whose own code compiles functions that ran eagerly."""
        reason = f"functions that its code compiles ran eagerly: {', '.join(sorted(names))}"
        return self._as_eager(AS_EAGER, reason)

    def _as_eager(self, how: str, reason: str) -> Prediction:
        """Return the prediction of a compiled cell from that of the eager one: never `oom`."""
        if self.how in ("", CLOSED_FORM):  # compiled or not, the parameters are there
            return self
        reason = "; ".join(filter(None, (reason, self.reason)))
        if how == AS_EAGER:
            reason += f"; the cell may take as little as 1/{MOST_OVERGUESS} of this"
        verdicts = dict(self.verdicts)
        for cap_bytes, verdict in self.verdicts.items():
            if verdict == "oom":
                is_far_over = self.plain_verdict(round(MOST_OVERGUESS * cap_bytes)) == "oom"
                verdicts[cap_bytes] = "unlikely" if is_far_over else "perhaps"
            elif how == MAY_TAKE_MORE:
                verdicts[cap_bytes] = self._unless_close(cap_bytes, verdict)
        return replace(self._named(how), reason=reason, verdicts=verdicts)

    def _named(self, how: str) -> Prediction:
        """Return the same prediction with another word for how it was made."""
        notes = {self.how: how}  # other notes are roles
        samples = [replace(one, note=notes.get(one.note, one.note)) for one in self.samples]
        return replace(self, how=how, samples=tuple(samples))

    @property
    def is_as_eager(self) -> bool:
        """True for a compiled cell that is predicted as if it were eager."""
        return self.how in (AS_EAGER, MAY_TAKE_MORE)

    def role_bytes(self, metric: str = "at_peak_bytes") -> dict[str, float]:
        """Return bytes by role at the predicted peak, or by formula with `closed_form_bytes`."""
        return {s.note: s.value for s in self.samples if s.metric == metric and s.value is not None}

    def least_bytes(self) -> float | None:
        """Return a lower bound of the memory if the peak is unknown, otherwise None."""
        if self.how != CLOSED_FORM:
            return None
        return sum(self.role_bytes("closed_form_bytes").values())

    def samples_with(self, verdict: Verdict | None) -> tuple[Sample, ...]:
        """Return the samples, with the verdict if there is one."""
        if not verdict:
            return self.samples
        return (*self.samples, VERDICT.sample(None, note=verdict))

    def why_oom(self, cap_bytes: int | None) -> str:
        """Return a sentence with the needed and the available memory."""
        least, available = self.least_bytes(), f"and there are {(cap_bytes or 0) / _GIB:.1f}"
        if least is not None:
            need = f"its parameters, gradients and moments take {least / _GIB:.1f} GiB"
            return f"{need}, {available}"
        peak = self.peak_bytes("peak_reserved_bytes") or 0
        return f"it is predicted to reserve {peak / _GIB:.1f} GiB, {available}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Prediction:
        body = json.loads(text)
        samples = tuple(Sample(**sample) for sample in body["samples"])
        # JSON has texts as keys only.
        verdicts = {int(cap): verdict for cap, verdict in body["verdicts"].items()}
        return cls(body["how"], body["reason"], samples, verdicts, body["module_bytes"])


def unknown(reason: str) -> Prediction:
    """Return a prediction of nothing, with a sample that has the reason."""
    sample = Sample("prediction", "peak_allocated_bytes", "bytes", None, "steady", note=reason)
    return Prediction("", reason, (sample,))


def unsupported_reason(cell: Cell) -> str:
    """Return why this cell's memory is not predicted; empty if it is."""
    if cell.task not in ("train_step", "attention"):
        return f"the memory of {cell.task} is not predicted"
    if getattr(cell.params, "cold_l2", False):
        return "with cold_l2 the size of the buffer that empties the cache depends on the GPU"
    if cell.params.device != "cuda":
        peak = f"on {cell.params.device} the peak is of the whole process, not only of its tensors"
        return f"{peak}; with --set device=cuda it is predicted"
    return ""


def predictable(cells: Iterable[Cell]) -> list[Cell]:
    """Return the cells whose memory is predicted."""
    return [cell for cell in cells if not unsupported_reason(cell)]


def generates_code(cell: Cell) -> bool:
    """Return True if a compiled cell is predicted from compiled code.

    The built-in model is predicted from the code of its blocks: that of the whole takes minutes to
    generate. With naive attention, its memory was within 3% of that of its compiled blocks.
    """
    values = cell.params.values()
    return values.get("compile", "eager") != "eager" and not _obstacle(cell)


def compiled_part(cell: Cell) -> str:
    """Return which code of a compiled cell is generated: of its `blocks`, or of the whole `model`.

    Your own model may compute its loss, whose code takes half the memory of the same loss run
    eagerly. It is compiled as a whole.
    """
    return "model" if _compiles_whole(cell) else "blocks"


def _compiles_whole(cell: Cell) -> bool:
    values = cell.params.values()
    return bool(values.get("model")) and values["compile"] == "model"


def _obstacle(cell: Cell) -> tuple[str, str] | None:
    """Return how a cell is predicted whose compiled code is not generated, and why; else None."""
    values = cell.params.values()
    mode = values["compile_mode"]
    if mode != "default":
        return AS_EAGER, f"the CUDA graphs of {mode} have memory of their own"
    if values["attention"] == "flex":
        return AS_EAGER, "flex attention is compiled in its own way"
    if values.get("checkpointing", "none") != "none":
        return AS_EAGER, "the compiler decides what its checkpoints compute again"
    if values["compile"] == "blocks":
        return None
    model = values.get("model")
    if cell.task != "train_step":
        return AS_EAGER, f"{cell.task} alone is compiled as a whole"
    if model and model.startswith(HUB):
        return MAY_TAKE_MORE, "compiled as a whole, a model of transformers builds its mask"
    return None


def _why_as_eager(cell: Cell) -> tuple[str, str]:
    """Return how a compiled cell is predicted whose code was not generated, and the reason."""
    if obstacle := _obstacle(cell):
        return obstacle
    if _compiles_whole(cell):
        return AS_EAGER, "torch's compiler needs a GPU for this model, or it is too large"
    return AS_EAGER, "torch's compiler needs a GPU for this model"


def memory_identity(cell: Cell) -> dict[str, Any]:
    """Return the values that decide a cell's memory: cells with equal ones share a prediction."""
    values = dict(cell.params.values())
    for name in axes_without(type(cell.params), Affects.MEMORY):
        del values[name]
    if values.get("precision") == "tf32":
        values["precision"] = "fp32"
    if generates_code(cell):
        values["compile"] = compiled_part(cell)
    return {"task": cell.task, "version": cell.version, **values}
