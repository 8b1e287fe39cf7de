"""How long each phase of a step takes: raw samples, never averages.

Two modes. `synced` waits for the device at each boundary and reads the host's clock: what the course's assignment
asks for, launch latency included. `pipelined` records device events and waits once, after the last step: the phases
run into each other as they do in training. Host stamps beside the events say how long the host took to enqueue and how
far it was ahead of the device (`lead`); the drain is the wait at the end. A host that is never ahead is the bottleneck.

How many steps: as the parameters say, or with `timing: adaptive` as many synced ones as tasks/spec/stopping.py finds
to be enough, and as many pipelined ones, which cannot be looked at before the last; or none of these where a step of the
warm-up that ran on, of the mode `check`, took as long as the synced ones.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from statistics import median

import torch

from tasks.harness.compilation import compile_facts, uses_cuda_graphs
from tasks.harness.device import Device
from tasks.harness.gc_pause import uncollected
from tasks.harness.stage import Session, Stage
from tasks.harness.workload import Watcher
from tasks.spec.order_statistics import half_width
from tasks.spec.parameters import TimedParams
from tasks.spec.stopping import StepDurations, StopRule
from tasks.spec.tables import Sample

_STEP = "step"
_STEPS_TO_RECORD_GRAPHS = 3  # run, record, replay for the first time
_NS_PER_MS = 1e6
_LONG_MS = 750.0  # of a first step: what the host does to begin the next one is then nothing


class SyncedTimer:
    """Host clock between synchronisations. What other watchers do at a boundary falls between two timed segments."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._began = 0
        self.phases: list[tuple[str, float]] = []

    def enter(self, phase: str) -> None:
        self._device.synchronize()
        self._began = time.perf_counter_ns()

    def leave(self, phase: str) -> None:
        self._device.synchronize()
        self.phases.append((phase, (time.perf_counter_ns() - self._began) / _NS_PER_MS))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class EventTimer:
    """Device events at each boundary, made beforehand, with the host's clock beside them."""

    def __init__(self, steps: int, boundaries: int) -> None:
        self._events = iter([_event() for _ in range(steps * boundaries)])
        self.marks: list[tuple[str, int, torch.cuda.Event]] = []

    def mark(self, name: str) -> None:
        event = next(self._events)
        event.record()
        self.marks.append((name, time.perf_counter_ns(), event))

    def enter(self, phase: str) -> None:
        self.mark(phase)

    def leave(self, phase: str) -> None:
        self.mark(phase)


def compile_first(session: Session) -> Iterator[Sample]:
    """The step that compiles, timed apart; with CUDA graphs also those that record them. None in eager mode."""
    if session.workload.compiled:
        graphs = uses_cuda_graphs(session.params)
        yield from _synced_steps(session, "compile", _STEPS_TO_RECORD_GRAPHS if graphs else 1)


def warm_up(session: Session) -> Iterator[Sample]:
    if _stop_rule(session) is not None:
        return _first_steps(session)
    return _looked_into(session, session.count("warmup_steps"))


def _looked_into(session: Session, count: int) -> Iterator[Sample]:
    """So many steps of warm-up. Who wants to see a steady one looks into the last."""
    last = count - 1
    yield from _synced_steps(session, "warmup", last)
    if last >= 0:
        with uncollected():
            yield from _synced_step(session, "warmup", last, *_looking_in(session))


def _first_steps(session: Session) -> Iterator[Sample]:
    """Of adaptive timing: those that are warm-up in any case. Which of those after them are, too, they tell together.

    What a first step does is done once. Then comes one to be looked into, and where a device queues work it runs on, to be held
    against the synced ones. Before a short one the host would still be at its start: there a second one is that.
    """
    if session.workload.device.kind != "cuda":
        yield from _looked_into(session, _cold_steps(session))
        return
    first = list(_synced_steps(session, "warmup", _cold_steps(session)))
    yield from first
    checked = _run_on(
        session, 1 if _whole(first)[0] > _LONG_MS else 2, "check", *_looking_in(session)
    )
    session.shelf["check"] = checked
    yield from checked


def _cold_steps(session: Session) -> int:
    return 1 if session.workload.device.kind == "cuda" else 2


def _looking_in(session: Session) -> list[Watcher]:
    """Those who want to see a steady step, once there was a first one."""
    looking_in: list[Watcher] = []
    if session.steps > 0:
        looking_in, session.on_last_warm_up = session.on_last_warm_up, []
    return looking_in


def count_compilation(session: Session) -> list[Sample]:
    """What torch.compile did by now, after every measured step: whatever compiled again among them shows."""
    if session.workload.compiled:
        session.facts |= compile_facts()
    return []


def time_synced(session: Session) -> Iterator[Sample]:
    rule = _stop_rule(session)
    if rule is None:
        return _synced_steps(session, "synced", session.count("measured_steps"))
    return _enough_synced_steps(session, rule)


def time_pipelined(session: Session) -> list[Sample]:
    """On CUDA, by its events. On the CPU it would be `synced` under another name, and of MPS no events are read: it is left out.

    With adaptive timing only where the step that ran on in the warm-up did not take as long as the synced ones do, by the
    precision that was asked for: else there is nothing to be gained by running on. Leaves the fact `timing_pipelined`.
    """
    if session.workload.device.kind != "cuda":
        return []
    rule = _stop_rule(session)
    if rule is None:
        return _run_on(session, session.count("measured_steps"), "pipelined")
    synced, checked = _whole(session.shelf["synced"]), _whole(session.shelf["check"])[-1]
    is_as_synced = (
        half_width(synced) <= rule.half_width
        and abs(checked / median(synced) - 1) <= rule.half_width
    )
    session.facts["timing_pipelined"] = "as synced" if is_as_synced else "measured"
    return [] if is_as_synced else _run_on(session, len(synced), "pipelined")


def _whole(samples: Iterable[Sample]) -> list[float]:
    return [
        sample.value or 0.0
        for sample in samples
        if (sample.phase, sample.metric) == (_STEP, "duration")
    ]


def _run_on(session: Session, steps: int, mode: str, *looking_in: Watcher) -> list[Sample]:
    """So many steps, waited for once. looking_in: who sees the first of them."""
    device = session.workload.device
    timer = EventTimer(steps, boundaries=2 + 2 * len(session.workload.phases))
    with uncollected():
        device.synchronize()
        for step in range(steps):
            timer.mark(_STEP)
            session.step(timer, *(looking_in if step == 0 else ()))
            timer.mark(_STEP)
        queued = time.perf_counter_ns()
        device.synchronize()
    drain = (time.perf_counter_ns() - queued) / _NS_PER_MS
    samples = list(_pipelined_samples(timer, mode))
    if session.workload.before_phase is not None:
        samples = _steps_as_sums(samples, mode)
    return [*samples, Sample("timing", "drain", "ms", drain, mode)]


def _stop_rule(session: Session) -> StopRule | None:
    return session.params.stop_rule if isinstance(session.params, TimedParams) else None


def _enough_synced_steps(session: Session, rule: StopRule) -> Iterator[Sample]:
    """Steps until the rule stops them. Those that were not steady yet go to the warm-up, each other one is a sample.

    Leaves the facts `timing_warmup_steps`, `timing_stopped_by` and `timing_half_width`, the one that was reached.
    """
    measured, steps, cold = StepDurations(rule), list[list[Sample]](), _cold_steps(session)
    with uncollected():
        while measured.stopped_by is None:
            steps.append(_synced_step(session, "synced", len(steps)))
            measured.add(*_whole(steps[-1]))
    warm_up = measured.warm_up
    session.facts |= {
        "timing_warmup_steps": cold + warm_up,
        "timing_stopped_by": measured.stopped_by,
        "timing_half_width": half_width(measured.steady),
    }
    session.shelf["synced"] = [
        sample for step in steps[warm_up:] for sample in step if sample.phase == _STEP
    ]
    for number, step in enumerate(steps):
        warming = number < warm_up
        place = cold + number if warming else number - warm_up
        yield from (
            replace(sample, mode="warmup" if warming else "synced", step=place) for sample in step
        )


def _synced_steps(session: Session, mode: str, count: int) -> Iterator[Sample]:
    with uncollected():
        for step in range(count):
            yield from _synced_step(session, mode, step)


def _synced_step(session: Session, mode: str, step: int, *looking_in: Watcher) -> list[Sample]:
    """One step. Its own duration is whole: what lies between the phases, such as clearing gradients, included.

    It is the sum of the phases where other watchers look in, and where a workload does something before each phase.
    """
    device = session.workload.device
    interrupted = (
        bool(session.on_first_step or looking_in) or session.workload.before_phase is not None
    )
    timer, whole = SyncedTimer(device), SyncedTimer(device)
    whole.enter(_STEP)
    session.step(timer, *looking_in)
    whole.leave(_STEP)
    total = sum(ms for _, ms in timer.phases) if interrupted else whole.phases[0][1]
    return [
        Sample("timing", "duration", "ms", ms, mode, phase, step)
        for phase, ms in [*timer.phases, (_STEP, total)]
    ]


def _pipelined_samples(timer: EventTimer, mode: str) -> Iterator[Sample]:
    """Durations on both clocks, and by how much the host was ahead of the device when it left each phase."""
    _, first_stamp, first_event = timer.marks[0]
    entered: dict[str, tuple[int, torch.cuda.Event]] = {}
    steps: Counter[str] = Counter()
    for name, stamp, event in timer.marks:
        if name not in entered:
            entered[name] = (stamp, event)
            continue
        began, start = entered.pop(name)
        measured = {
            "duration": start.elapsed_time(event),
            "host": (stamp - began) / _NS_PER_MS,
            "lead": first_event.elapsed_time(event) - (stamp - first_stamp) / _NS_PER_MS,
        }
        for metric, value in measured.items():
            yield Sample("timing", metric, "ms", value, mode, name, steps[name])
        steps[name] += 1


def _steps_as_sums(samples: list[Sample], mode: str) -> list[Sample]:
    """Durations of whole steps from those of their phases: what lies between is not theirs."""
    phases = [sample for sample in samples if sample.phase != _STEP]
    sums: Counter[int | None] = Counter()
    for sample in phases:
        if sample.metric == "duration":
            sums[sample.step] += sample.value or 0.0  # type: ignore[assignment]
    return [
        *phases,
        *(Sample("timing", "duration", "ms", ms, mode, _STEP, step) for step, ms in sums.items()),
    ]


STAGES = (
    Stage("compile", 20, compile_first),
    Stage("warm-up", 21, warm_up),
    Stage("timing synced", 23, time_synced),
    Stage("timing pipelined", 24, time_pipelined),
    Stage("compilation counted", 25, count_compilation),
)
