"""The fastest of several configurations of one model: what is surely faster than the default."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from orchestrator.analysis.axes import Row, each, has_value, number_in
from orchestrator.analysis.cells import derive_cells, valid_attempts
from orchestrator.analysis.metric_columns import summarise
from orchestrator.analysis.pairs import MIN_COVERAGE
from orchestrator.analysis.results import Results
from orchestrator.analysis.timing_columns import ATTEMPT_KEY, step_attempts
from orchestrator.store.manifest import BEST
from tasks.spec.axes import FrozenValues

# A candidate is recommended if its time is at most this share of the default's: what the CPU limits
# differs by 10 % from process to process, and what the GPU limits by 0.15 %.
SURELY_FASTER, _SURELY_FASTER_ON_CPU = 0.98, 0.70
_ALIKE, _ALIKE_ON_CPU = 1.02, 1.30
_CONFIDENCE = 0.95
_LESS_MEMORY = 0.99  # share of a peak


@dataclass(frozen=True)
class Speed:
    """The measured step of a cell, in its first attempt.

    low_s, high_s: interval of the median, which has a confidence of `coverage`.
    is_cpu_bound: None if it is unknown. is_contended: other processes used its cores.
    is_beaten: the timing ended early.
    synced_s: the step that waits after each phase. rounds: medians of the later attempts, in s.
    wall_s: duration of the whole attempt.
    """

    step_s: float
    low_s: float
    high_s: float
    is_cpu_bound: bool | None
    peak_bytes: float | None
    synced_s: float | None = None
    is_beaten: bool = False
    rounds: tuple[float, ...] = ()
    wall_s: float = 0.0
    coverage: float = 1.0
    is_contended: bool = False

    @property
    def has_interval(self) -> bool:
        """False for fewer than six steps, unless each was slower than the best candidate."""
        return self.coverage >= MIN_COVERAGE or self.is_beaten


def speeds_of(results: Results) -> dict[str, Speed]:
    """Return the speed of each cell with a measured step, by its id.

    The first attempt counts, also when others have followed: a search that is repeated then decides
    as it did before, and what is confirmed was not chosen for a time that happened to be short.
    """
    samples = results.read_table("samples")
    attempts = results.read_table("attempts")
    if samples.empty:
        return {}
    is_known = attempts["cell"].isin(results.cells["cell"])
    valid = valid_attempts(attempts[is_known], results.marks)
    steps = summarise(step_attempts(samples.merge(valid[ATTEMPT_KEY])), ATTEMPT_KEY)
    first, cells = valid.sort_values("attempt").drop_duplicates("cell"), results.cells
    if len(first) < len(valid):  # `cells` shows the last attempts
        cells = derive_cells(first, samples)
    rows = {row["cell"]: row for row in cells.to_dict("records")}
    found = {}
    for cell, own in steps.groupby(level="cell", observed=True):
        row = rows.get(cell)
        medians = own["median"].tolist()
        if row is None or not medians[0] > 0:
            continue
        synced_ms = number_in(row, "step_synced_ms_median")
        found[str(cell)] = Speed(
            medians[0] / 1e3,
            float(own["ci_low"].iloc[0]) / 1e3,
            float(own["ci_high"].iloc[0]) / 1e3,
            row.get("device") == "cpu" or _flag_in(row, "cpu_bound"),
            number_in(row, "peak_allocated_bytes"),
            None if synced_ms is None else synced_ms / 1e3,
            row.get("timing_beaten") is True,
            tuple(median / 1e3 for median in medians[1:]),
            float(row["wall_s"]),
            float(own["coverage"].iloc[0]),
            bool(_flag_in(row, "cpu_contended")),
        )
    return found


def _flag_in(row: Row, column: str) -> bool | None:
    return bool(row[column]) if has_value(row, column) else None


@dataclass(frozen=True)
class Contender:
    """A configuration. options: its values of the searched axes.

    tokens: of a step; 1 for a task without them, whose steps are compared.
    """

    options: FrozenValues
    tokens: int = 1
    speed: Speed | None = None

    @property
    def is_cpu_bound(self) -> bool:
        """True if the speed of the CPU limits its steps, or if that is unknown."""
        return self.speed is not None and self.speed.is_cpu_bound is not False

    @property
    def pace_s(self) -> float:
        """Seconds for each token, as measured."""
        assert self.speed is not None
        return self.speed.step_s / self.tokens

    @property
    def pace_interval_s(self) -> tuple[float, float]:
        """The interval of the pace at 95 %: any pace, if there are too few steps for one."""
        assert self.speed is not None
        if not self.speed.has_interval:
            return 0.0, math.inf
        return self.speed.low_s / self.tokens, self.speed.high_s / self.tokens


C = TypeVar("C", bound=Contender)


@dataclass(frozen=True)
class Confirmation:
    """Two configurations, measured again.

    ratio: time of the one over that of the other. lower, upper: the ends of its one-sided 95 %
    intervals.
    """

    rounds: int
    ratio: float
    lower: float
    upper: float

    @property
    def is_faster(self) -> bool:
        """True if the one is surely faster than the other."""
        return self.upper < SURELY_FASTER

    @property
    def is_undecided(self) -> bool:
        """True if more rounds may show that the one is faster, or that it is not."""
        return self.lower < SURELY_FASTER <= self.upper


def confirm(one: Contender, other: Contender) -> Confirmation | None:
    """Compare the rounds of two configurations, or return None if there are fewer than two."""
    if one.speed is None or other.speed is None:
        return None
    pairs = list(zip(one.speed.rounds, other.speed.rounds, strict=False))
    if len(pairs) < 2:
        return None
    # Imported late: it takes a tenth of a second, and most commands compare nothing.
    from scipy.special import stdtrit

    logs = np.log([(own / one.tokens) / (against / other.tokens) for own, against in pairs])
    mean, error = float(np.mean(logs)), float(np.std(logs, ddof=1)) / math.sqrt(len(logs))
    width = float(stdtrit(len(logs) - 1, _CONFIDENCE)) * error
    ends = map(float, np.exp([mean - width, mean + width]))
    return Confirmation(len(pairs), math.exp(mean), *ends)


@dataclass(frozen=True)
class Ranking(Generic[C]):
    """Configurations of one model, context and so on. default: the position of the one to compare
    with.
    """

    entrants: tuple[C, ...]
    default: int

    @property
    def measured(self) -> list[C]:
        """The entrants with a measured step, the fastest first."""
        known = [one for one in self.entrants if one.speed]
        return sorted(known, key=lambda one: one.pace_s)

    @property
    def challenger(self) -> C | None:
        """The entrant that may be better than the default: a surely faster one, or the fastest."""
        measured, default = self.measured, self.entrants[self.default]
        if not measured:
            return None
        found = self.alike(measured[0])
        if default.speed:
            sure = [one for one in found if is_surely_faster(one, default)]
            found = sure or measured[:1]
        best = min(found, key=self._cost)
        return None if best is default else best

    @property
    def winner(self) -> C | None:
        """The recommended entrant: the default unless another one is surely faster."""
        default, best = self.entrants[self.default], self.challenger
        if best is None or default.speed is None:
            return best or (default if default.speed else None)
        confirmation = self.confirmation
        is_sure = confirmation.is_faster if confirmation else is_surely_faster(best, default)
        return best if is_sure else default

    @property
    def confirmation(self) -> Confirmation | None:
        """The rounds of the challenger and of the default, if there are any."""
        best = self.challenger
        return confirm(best, self.entrants[self.default]) if best else None

    @property
    def rounds(self) -> int | None:
        """The number of rounds of the challenger and the default, None without two of them."""
        best, default = self.challenger, self.entrants[self.default]
        if best is None or best.speed is None or default.speed is None:
            return None
        return min(len(best.speed.rounds), len(default.speed.rounds))

    def alike(self, best: C) -> list[C]:
        """Return the entrants that are about as fast as this one, and this one."""
        found = []
        for one in self.measured:
            on_cpu = one.is_cpu_bound or best.is_cpu_bound
            if one.pace_s <= best.pace_s * (_ALIKE_ON_CPU if on_cpu else _ALIKE):
                found.append(one)
        return found

    def without_options(self, best: C) -> Iterator[tuple[str, C]]:
        """Yield options of the best with the fastest entrant that differs in this one alone."""
        for name in best.options:
            others = [one for one in self.measured if _changed(one, best) == [name]]
            if others:
                yield name, others[0]

    def front(self, best: C) -> list[C]:
        """Return the slower entrants that no other one beats in both speed and memory."""
        found: list[C] = []
        least = best.speed.peak_bytes if best.speed else None
        if least is None:
            return found
        measured = self.measured
        for one in measured[measured.index(best) :]:
            peak = one.speed.peak_bytes if one.speed else None
            if peak and peak < _LESS_MEMORY * least:
                found.append(one)
                least = peak
        return found

    def _cost(self, one: C) -> tuple[bool, float, int]:
        # What the CPU limits is chosen last: on another host it may be slower.
        if one.speed is None or one.is_cpu_bound:
            return True, one.pace_s, 0
        changes = len(_changed(one, self.entrants[self.default]))
        return False, one.speed.peak_bytes or math.inf, changes


def _changed(one: Contender, other: Contender) -> list[str]:
    return [name for name, value in one.options.items() if value != other.options.get(name)]


def times_as_fast(one: Contender, other: Contender) -> tuple[float, float, float]:
    """Return how many times as fast one is as the other, and the ends of the interval.

    The rounds decide, if both have some. Otherwise the ends are those of both intervals. Without one
    of these, they are 0 and infinity.
    """
    if again := confirm(one, other):
        return 1 / again.ratio, 1 / again.upper, 1 / again.lower
    gained = other.pace_s / one.pace_s
    (low_s, high_s), (other_low_s, other_high_s) = one.pace_interval_s, other.pace_interval_s
    if math.inf in (high_s, other_high_s):
        return gained, 0.0, math.inf
    return gained, other_low_s / high_s, other_high_s / low_s


def is_surely_faster(one: Contender, other: Contender) -> bool:
    """Return True if the difference is above what differs between processes and between steps."""
    is_above_noise = one.pace_s <= sure_share(one, other) * other.pace_s
    return is_above_noise and one.pace_interval_s[1] <= other.pace_interval_s[0]


def sure_share(one: Contender, other: Contender) -> float:
    """Return the share of a time below which another one is faster in every process."""
    on_cpu = one.is_cpu_bound or other.is_cpu_bound
    return _SURELY_FASTER_ON_CPU if on_cpu else SURELY_FASTER


@dataclass(frozen=True, kw_only=True)
class StoredCandidate(Contender):
    """A candidate of a search in a run. row: of its cell, None if it was not measured.

    reason: why it was not measured; empty if the search expected too little of it.
    """

    row: Row | None
    reason: str


@dataclass(frozen=True)
class StoredSearch(Ranking[StoredCandidate]):
    """A group of the last search of a run. ended: why its search ended; empty if it did not."""

    ended: str = ""


def stored_searches(results: Results) -> list[StoredSearch]:
    """Return the groups of the last `sweep best` of a run, with what its rows show by now."""
    stored = results.manifest.get(BEST)
    if not stored:
        return []
    speeds = speeds_of(results)
    rows = {row["cell"]: row for row in each(results.cells)}
    searches = []
    for group in stored["groups"]:
        entrants = []
        for cell, reason in group["candidates"].items():
            row = rows.get(cell)
            options = {name: row[name] for name in stored["over"]} if row else {}
            tokens = int(row["tokens"]) if row and has_value(row, "tokens") else 1
            entrants.append(
                StoredCandidate(options, tokens, speeds.get(cell), row=row, reason=reason)
            )
        default = list(group["candidates"]).index(group["default"])
        searches.append(StoredSearch(tuple(entrants), default, group["ended"]))
    return searches
