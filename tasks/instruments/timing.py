"""Time each phase of each step: raw samples, never averages.

There are two modes. `synced` waits for the device at each phase boundary and reads the host's
clock, as the course's assignment does; it includes the launch latency. `pipelined` records
device events and waits once, after the last step, so that phases overlap as in training. Host
timestamps taken with the events give the time that the host needs to enqueue a phase, and its
lead over the device (`lead`). `drain` is the wait at the end.

The parameters fix the number of steps. With `timing: adaptive`, tasks/spec/stopping.py decides
when enough steps are synced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from statistics import median

import torch

from tasks.harness.compilation import compile_facts, uses_cuda_graphs
from tasks.harness.device import Device
from tasks.harness.stage import Session, Stage
from tasks.harness.workload import Watcher
from tasks.process import clock
from tasks.process.gc_pause import uncollected
from tasks.spec.order_statistics import half_width
from tasks.spec.parameters import StopRule, TimedParams
from tasks.spec.stopping import StepDurations
from tasks.spec.tables import Sample

_STEP = "step"
# With CUDA graphs, torch runs the first step, records the second, and replays the third.
_STEPS_TO_RECORD_GRAPHS = 3
_NS_PER_MS = 1e6
# Steps of another instrument, if none were timed.
_FEW_STEPS = 5
# After a longer first step, the start of the next one on the host is negligible.
_LONG_MS = 750.0


class SyncedTimer:
    """Watcher that reads the host's clock between synchronisations.

    phases: ms by phase, summed over the micro-batches of the step.
    """

    # It is the innermost watcher: the work of others falls between two timed segments.

    def __init__(self, device: Device) -> None:
        self._device = device
        self._began = 0
        self.phases: dict[str, float] = {}

    def enter(self, phase: str) -> None:
        self._device.synchronize()
        self._began = clock.perf_counter_ns()

    def leave(self, phase: str) -> None:
        self._device.synchronize()
        ms = (clock.perf_counter_ns() - self._began) / _NS_PER_MS
        self.phases[phase] = self.phases.get(phase, 0.0) + ms


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class EventTimer:
    """Watcher that records a device event and the host's clock at each boundary."""

    def __init__(self, steps: int, boundaries: int) -> None:
        # Created in advance, so that no event is created while steps run.
        self._events = iter([_event() for _ in range(steps * boundaries)])
        self.marks: list[tuple[str, int, torch.cuda.Event]] = []

    def mark(self, name: str) -> None:
        # Autograd makes the caller's stream wait for its own, so an event after a backward pass is
        # in order, too. Gaps that a slow host causes count in the phase in which they occur.
        event = next(self._events)
        event.record()
        self.marks.append((name, clock.perf_counter_ns(), event))

    def enter(self, phase: str) -> None:
        self.mark(phase)

    def leave(self, phase: str) -> None:
        self.mark(phase)


def compile_first(session: Session) -> Iterator[Sample]:
    """Yield the durations of the compiling steps: one, or three with CUDA graphs; none if eager."""
    if session.workload.compiled:
        graphs = uses_cuda_graphs(session.params)
        yield from _synced_steps(session, "compile", _STEPS_TO_RECORD_GRAPHS if graphs else 1)


def warm_up(session: Session) -> Iterator[Sample]:
    """Return the durations of the warm-up steps."""
    if _stop_rule(session) is not None:
        return _first_steps(session)
    return _watched_warm_up(session, session.count("warmup_steps"))


def _watched_warm_up(session: Session, count: int) -> Iterator[Sample]:
    """Yield the durations of warm-up steps; other instruments watch the last one."""
    last = count - 1
    yield from _synced_steps(session, "warmup", last)
    if last >= 0:
        with uncollected():
            yield from _synced_step(session, "warmup", last, *_steady_watchers(session))


def _first_steps(session: Session) -> Iterator[Sample]:
    """Yield the durations of the first steps with adaptive timing, which are always warm-up."""
    # The first step is the slowest, and the next one is for other instruments. On CUDA that one is
    # pipelined, for the comparison with synced steps. After a short first step the host has no lead
    # yet, so a second pipelined step follows.
    if session.workload.device.kind != "cuda":
        yield from _watched_warm_up(session, _cold_steps(session))
        return
    first = list(_synced_steps(session, "warmup", _cold_steps(session)))
    yield from first
    steps = 1 if session.agree(_whole(first)[0]) > _LONG_MS else 2
    checked = _run_pipelined(session, steps, "check", *_steady_watchers(session))
    session.shelf["check"] = checked
    yield from checked


def _cold_steps(session: Session) -> int:
    return 1 if session.workload.device.kind == "cuda" else 2


def _steady_watchers(session: Session) -> list[Watcher]:
    """Return the watchers of a steady step, once; none before the first step."""
    watchers: list[Watcher] = []
    if session.steps > 0:
        watchers, session.on_last_warm_up = session.on_last_warm_up, []
    return watchers


def count_compilation(session: Session) -> list[Sample]:
    """Set the facts about torch.compile after all measured steps, so that recompilations show."""
    if session.workload.compiled:
        session.facts |= compile_facts()
    return []


def verify(session: Session) -> list[Sample]:
    """Check what several ranks have computed together, after all timed steps."""
    if session.workload.verify is not None:
        session.workload.verify()
    return []


def time_synced(session: Session) -> Iterator[Sample]:
    """Return the durations of steps that wait for the device at each boundary."""
    rule = _stop_rule(session)
    if rule is None:
        return _synced_steps(session, "synced", session.count("measured_steps"))
    return _enough_synced_steps(session, rule)


def time_pipelined(session: Session) -> list[Sample]:
    """Return the durations of pipelined steps on CUDA, measured with events.

    With adaptive timing there are none if the pipelined step of the warm-up took as long as the
    synced steps, within the half-width that the cell demands. Set the fact `timing_pipelined`.
    """
    # On the CPU they would equal the synced ones, and events of MPS are not supported.
    if session.workload.device.kind != "cuda":
        return []
    rule = _stop_rule(session)
    if rule is None:
        session.shelf["pipelined"] = _run_pipelined(
            session, session.count("measured_steps"), "pipelined"
        )
        return session.shelf["pipelined"]
    synced, checked = _whole(session.shelf["synced"]), _whole(session.shelf["check"])[-1]
    deviation = abs(checked / median(synced) - 1)
    is_close = half_width(synced) <= rule.half_width and deviation <= rule.half_width
    if session.agree(is_close):
        session.facts["timing_pipelined"] = "as synced"
        return []
    session.facts["timing_pipelined"] = "measured"
    # As many as synced steps: no rule can stop them, because events cannot be read in between.
    return _run_pipelined(session, len(synced), "pipelined")


def _whole(samples: Iterable[Sample]) -> list[float]:
    """Return the durations of whole steps in ms."""
    wanted = (_STEP, "duration")
    return [one.value or 0.0 for one in samples if (one.phase, one.metric) == wanted]


def _run_pipelined(session: Session, steps: int, mode: str, *watchers: Watcher) -> list[Sample]:
    """Run steps without waiting until the last one. The watchers see the first step."""
    device = session.workload.device
    timer = EventTimer(steps, boundaries=2 + 2 * session.workload.phase_runs)
    with uncollected():
        device.synchronize()
        for step in range(steps):
            timer.mark(_STEP)
            session.step(timer, *(watchers if step == 0 else ()))
            timer.mark(_STEP)
        queued = clock.perf_counter_ns()
        device.synchronize()
    # Close to 0 if the host is the bottleneck: the device then waits for each launch.
    drain = (clock.perf_counter_ns() - queued) / _NS_PER_MS
    samples = list(_pipelined_samples(timer, mode))
    if session.workload.before_phase is not None:
        samples = _steps_as_sums(samples, mode)
    for number, ms in enumerate(_whole(samples), start=1):
        _require_passed(ms, number, mode)
    return [*samples, Sample("timing", "drain", "ms", drain, mode)]


def timed_step_ms(session: Session) -> list[float]:
    """Return the durations of the steps on CUDA that were timed without waiting, or of others."""
    return _whole(session.shelf.get("pipelined", ())) or pipelined_step_ms(session)


def pipelined_step_ms(session: Session) -> list[float]:
    """Run as many steps on CUDA as were timed, without waiting. Return their durations."""
    steps = len(_whole(session.shelf.get("pipelined", ()))) or _FEW_STEPS
    return _whole(_run_pipelined(session, steps, "pipelined"))


def _stop_rule(session: Session) -> StopRule | None:
    if isinstance(session.params, TimedParams):
        return session.params.stop_rule
    return None


def _enough_synced_steps(session: Session, rule: StopRule) -> Iterator[Sample]:
    """Yield the durations of steps until the rule stops, and set facts about them.

    Unsteady steps count as warm-up.
    """
    measured = StepDurations(rule, session.beaten_ms)
    cold = _cold_steps(session)
    steps: list[list[Sample]] = []
    with uncollected():
        while session.agree(measured.stopped_by) is None:
            steps.append(_synced_step(session, "synced", len(steps)))
            measured.add(*_whole(steps[-1]))
    warm_up = session.agree(measured.warm_up)
    session.facts |= {
        "timing_warmup_steps": cold + warm_up,
        "timing_stopped_by": measured.stopped_by,
        "timing_half_width": half_width(measured.steady),
    }
    session.shelf["synced"] = list(chain(*steps[warm_up:]))
    for number, step in enumerate(steps):
        mode, index = "synced", number - warm_up
        if number < warm_up:
            mode, index = "warmup", cold + number
        yield from (replace(sample, mode=mode, step=index) for sample in step)


def _synced_steps(session: Session, mode: str, count: int) -> Iterator[Sample]:
    with uncollected():
        for step in range(count):
            yield from _synced_step(session, mode, step)


def _synced_step(session: Session, mode: str, step: int, *watchers: Watcher) -> list[Sample]:
    """Run one synced step. It includes work between phases, such as clearing gradients."""
    device, is_watched = session.workload.device, bool(session.on_first_step or watchers)
    timer, whole = SyncedTimer(device), SyncedTimer(device)
    whole.enter(_STEP)
    session.step(timer, *watchers)
    whole.leave(_STEP)
    durations = {**timer.phases, **whole.phases}
    # Other watchers, or the workload itself, do work between phases that is not the step's.
    if is_watched or session.workload.before_phase is not None:
        durations[_STEP] = sum(timer.phases.values())
    _require_passed(durations[_STEP], step + 1, mode)
    samples = []
    for phase, ms in durations.items():
        samples.append(Sample("timing", "duration", "ms", ms, mode, phase, step))
    return samples


def _require_passed(ms: float, number: int, mode: str) -> None:
    if not ms > 0:
        raise RuntimeError(
            f"the clock did not advance in step {number} of {mode} timing. Check whether the model "
            "replaces time.perf_counter."
        )


def _pipelined_samples(timer: EventTimer, mode: str) -> Iterator[Sample]:
    """Yield durations on both clocks, and the lead of the CPU after each phase, in ms.

    The durations of a phase are summed over the micro-batches of a step. The lead is the time since
    the first mark on the GPU less that on the CPU, after the last micro-batch.
    """
    _, first_stamp, first_event = timer.marks[0]
    entered: dict[str, tuple[int, torch.cuda.Event]] = {}
    totals: dict[str, dict[str, float]] = {}
    step = 0
    for name, stamp, event in timer.marks:
        if name not in entered:
            entered[name] = (stamp, event)
            continue
        began, start = entered.pop(name)
        total = totals.setdefault(name, {"duration": 0.0, "host": 0.0})
        total["duration"] += start.elapsed_time(event)
        total["host"] += (stamp - began) / _NS_PER_MS
        total["lead"] = first_event.elapsed_time(event) - (stamp - first_stamp) / _NS_PER_MS
        if name != _STEP:
            continue
        for phase, measured in totals.items():
            for metric, ms in measured.items():
                yield Sample("timing", metric, "ms", ms, mode, phase, step)
        totals.clear()
        step += 1


def _steps_as_sums(samples: list[Sample], mode: str) -> list[Sample]:
    """Replace the durations of whole steps by the sums of their phases."""
    phases = [sample for sample in samples if sample.phase != _STEP]
    sums: Counter[int | None] = Counter()
    for sample in phases:
        if sample.metric == "duration":
            sums[sample.step] += sample.value or 0.0  # type: ignore[assignment]
    for step, ms in sums.items():
        phases.append(Sample("timing", "duration", "ms", ms, mode, _STEP, step))
    return phases


STAGES = (
    Stage("compile", 20, compile_first),
    Stage("warm-up", 21, warm_up),
    Stage("timing synced", 23, time_synced),
    Stage("timing pipelined", 24, time_pipelined),
    Stage("compilation counted", 25, count_compilation),
    Stage("ranks compared", 26, verify),
)
