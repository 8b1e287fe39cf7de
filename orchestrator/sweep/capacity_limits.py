"""Results of a search for the largest context or batch: bounds, searches and limits.

Apart from `capacity_search`, so that the command line prints limits without importing a sweep.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import ValidationError

from orchestrator.hardware.gpu_catalog import GpuModel
from orchestrator.planning.prediction_requests import verdict_of
from orchestrator.store.cell_state import PENDING
from orchestrator.sweep.outcome_log import SweepResult
from tasks.prediction.records import Prediction
from tasks.spec.cell import Cell
from tasks.spec.registry import make_cell
from tasks.spec.status import Status

DECIDED = frozenset({Status.OK, Status.OOM})


@dataclass(frozen=True)
class Bounds:
    """The values to try: multiples of `granularity` along `axis`, at most `up_to`."""

    axis: str
    granularity: int
    up_to: int


class Search:
    """A search for the largest multiple that fits: hints first, growing steps, then bisection.

    fits: the largest value known to fit, or 0. fails: the smallest value known not to fit.
    unanswered: the smallest value that cannot be decided. Smaller ones are still tried.
    """

    def __init__(self, bounds: Bounds, hints: Iterable[int] = ()) -> None:
        self._step = self._granularity = bounds.granularity
        self._most = bounds.up_to // bounds.granularity * bounds.granularity
        self._hints = tuple(hints)
        self.fits = 0
        self.fails: int | None = None
        self.unanswered: int | None = None

    @property
    def next(self) -> int | None:
        """The value to try, or None if the largest one is known."""
        ends = [end for end in (self.fails, self.unanswered) if end is not None]
        end = min(ends, default=self._most + self._granularity)
        if end - self.fits <= self._granularity:
            return None
        for hint in self._hints:
            if self.fits < hint < end:
                return hint
        if not ends:
            return min(self.fits + self._step, self._most)
        return self.fits + max(1, (end - self.fits) // self._granularity // 2) * self._granularity

    def learn(self, value: int, fits: bool) -> None:
        """Record whether a value fits."""
        if fits:
            self.fits = max(self.fits, value)
            self._step *= 2
        else:
            self.fails = min(value, self.fails or value)

    def give_up(self, value: int) -> None:
        """Record that a value cannot be decided. The next one to try is smaller."""
        self.unanswered = min(value, self.unanswered or value)


@dataclass
class Limit:
    """The limit of all cells that differ along one axis alone.

    values: the other axes of the task.
    surely: search for the largest value that is predicted to fit with a margin.
    perhaps: search for the largest one that may fit, or None if predictions cannot tell.
    unpredicted: why nothing is predicted from a value on. failure: why the measuring stopped early.
    """

    task: str
    values: Mapping[str, object]
    bounds: Bounds
    surely: Search
    perhaps: Search | None
    predictions: dict[int, Prediction] = field(default_factory=dict)
    unpredicted: str = ""
    measured: Search | None = None
    failure: str = ""
    refused: int | None = None  # the smallest value that the task's parameters refuse

    def at(self, value: int) -> Cell:
        """Return the cell with this value of the axis."""
        return make_cell(self.task, {**self.values, self.bounds.axis: value})

    def reason_against(self, value: int) -> str:
        """Return why there is no cell with this value; empty if there is one."""
        try:
            self.at(value)
        except ValidationError as error:
            return error.errors()[0]["msg"].removeprefix("Value error, ")
        return ""

    def accepts(self, value: int) -> bool:
        """Return True if there is a cell with this value. Record it if the task refuses it."""
        reason = self.reason_against(value)
        if reason:
            self.refused = value
            self._give_up(value, reason)
        return not reason

    def _give_up(self, value: int, reason: str) -> None:
        self.unpredicted = f"{value} cannot be predicted: {reason}"
        for search in filter(None, (self.surely, self.perhaps)):
            search.give_up(value)

    @property
    def is_unknown(self) -> bool:
        """True if no limit was found, or if the measuring stopped early."""
        if self.measured is None:
            return bool(self.unpredicted) and not self.surely.fits
        return bool(self.failure)

    @property
    def next_to_predict(self) -> int | None:
        """The value to predict next, or None if prediction finds nothing more."""
        if self.surely.next is None and self.perhaps is not None:
            return self.perhaps.next
        return self.surely.next

    @property
    def next_to_measure(self) -> int | None:
        """The value to measure next, or None if nothing is left to measure."""
        if self.measured is None or self.failure:
            return None
        return self.measured.next

    def learn_prediction(self, value: int, prediction: Prediction, gpu: GpuModel | None) -> None:
        """Record the prediction for a value on this GPU."""
        self.predictions[value] = prediction
        verdict = verdict_of(self.at(value), prediction, gpu)
        if verdict is None:
            # A model may refuse lengths above its own limit, and run at all others.
            self._give_up(value, prediction.reason)
            return
        if prediction.is_as_eager:
            # Compiled code usually needs less memory than the eager code that is predicted.
            self.perhaps = None
        self.surely.learn(value, verdict == "fits")
        if self.perhaps is not None:
            self.perhaps.learn(value, verdict != "oom")

    def begin_measuring(self) -> None:
        """Start a search by measurement, which tries the predicted limits first."""
        fails = (self.perhaps or self.surely).fails
        hints = [value for value in (self.surely.fits, fails) if value]
        self.measured = Search(self.bounds, hints)
        if self.refused is not None:
            self.measured.give_up(self.refused)

    def learn_status(self, value: int, status: str) -> None:
        """Record how the cell with this value ended. Only OK and OOM decide whether it fits."""
        if status in DECIDED and self.measured is not None:
            self.measured.learn(value, status == Status.OK)
        elif status == PENDING:  # a check has excluded it, or --skip-predicted-oom
            self.failure = f"{value} was not measured"
        else:
            self.failure = f"{value} ended as {status}"


@dataclass(frozen=True)
class Found:
    """The limits on a GPU, and the result of the last round of measuring, if there was one."""

    groups: Sequence[Limit]
    gpu: GpuModel | None
    result: SweepResult | None = None
