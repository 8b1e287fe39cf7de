"""Traces of several processes in one file of torch.profiler, and launches of every kind of device."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tasks.traces.attribution import attribute
from tasks.traces.chrome import read_chrome_devices

Event = dict[str, Any]
# Kernels of a step: the moment of the launch and the duration in µs.
KERNELS = (("forward", 20, 100), ("backward", 230, 150), ("update", 550, 80))
TOTALS = {"forward": 100.0, "backward": 150.0, "optimizer": 80.0}


@dataclass(frozen=True)
class Rank:
    """Two steps of a rank. scale: factor of its kernels' durations; queued: µs after the launch."""

    pid: int | str = 100
    device: int = 0
    device_pid: int | str = 0
    scale: float = 1.0
    begin: float = 0.0
    queued: float = 10.0
    category: str = "cuda_runtime"

    def events(self) -> list[Event]:
        events = []
        for step in range(2):
            at = self.begin + 1000 * step
            for name, start, took in (
                (f"ProfilerStep#{step}", 0, 900),
                ("forward", 10, 200),
                ("backward", 220, 300),
                ("Optimizer.step#Lion.step", 540, 200),
            ):
                events.append(self._host("user_annotation", name, at + start, took))
            for index, (name, start, took) in enumerate(KERNELS):
                number = 1 + 3 * step + index
                events += self._kernel(name, at + start, took * self.scale, number)
        return events

    def _kernel(self, name: str, at: float, took: float, number: int) -> list[Event]:
        launch = self._host(self.category, "launch", at, 2)
        numbers = {"correlation": number}
        place = {"pid": self.device_pid, "tid": 7, "ts": at + self.queued, "dur": took}
        kernel = {"ph": "X", "cat": "kernel", "name": name, **place}
        args = {**numbers, "device": self.device, "stream": 7}
        return [{**launch, "args": numbers}, {**kernel, "args": args}]

    def _host(self, category: str, name: str, at: float, took: float) -> Event:
        place = {"pid": self.pid, "tid": 2, "ts": at, "dur": took}
        return {"ph": "X", "cat": category, "name": name, **place}


def totals_of(
    events: Sequence[Event], path: Path
) -> dict[str, tuple[int | None, dict[str, float]]]:
    """Return the steps of each process and GPU, and its kernel time by phase in µs for one step."""
    path.write_text(json.dumps({"traceEvents": list(events)}))
    found = {}
    for rank, trace in read_chrome_devices(path, {}).items():
        totals_ns: Counter[str] = Counter()
        for work in attribute(trace.timeline):
            totals_ns[work.phase] += work.duration_ns
        steps = trace.ranges.steps
        found[rank] = (steps, {name: ns / 1000 / (steps or 1) for name, ns in totals_ns.items()})
    return found


def scaled(scale: float) -> tuple[int, dict[str, float]]:
    return 2, {phase: us * scale for phase, us in TOTALS.items()}


def one_after_the_other(events: Sequence[Sequence[Event]]) -> list[Event]:
    return [event for own in events for event in own]


def work_first(events: Sequence[Sequence[Event]]) -> list[Event]:
    return [event for own in events for event in sorted(own, key=lambda e: e["cat"] != "kernel")]


def work_last(events: Sequence[Sequence[Event]]) -> list[Event]:
    return [event for own in events for event in sorted(own, key=lambda e: e["cat"] == "kernel")]


def by_time(events: Sequence[Sequence[Event]]) -> list[Event]:
    return sorted(one_after_the_other(events), key=lambda event: event["ts"])


ORDERS = (one_after_the_other, work_first, work_last, by_time)
RANKS = {
    "devices 0 and 1": (Rank(), Rank(200, 1, 1, 1.5, 330)),
    "device 0 twice": (Rank(), Rank(200, 0, 0, 1.5, 330)),
    "at once, with long queues": (Rank(queued=500), Rank(200, 1, 1, 1.5, 3, 500)),
    "labelled ids": (Rank("[TP00] 9", 0, "[TP00] 0"), Rank("[TP01] 9", 0, "[TP01] 0", 1.5, 5)),
    "ids of ranks": (Rank(0, 0, 0), Rank(1, 0, 1, 1.5, 5)),
    "three of one device": (Rank(), Rank(200, scale=1.5, begin=5), Rank(300, scale=2, begin=330)),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
def test_merged_ranks_have_the_values_of_each_alone(
    ranks: Sequence[Rank], order: Callable[[Sequence[Sequence[Event]]], list[Event]], tmp_path: Path
) -> None:
    merged = totals_of(order([rank.events() for rank in ranks]), tmp_path / "merged.json")
    assert merged == {
        f"process {rank.pid}, GPU {rank.device}": scaled(rank.scale) for rank in ranks
    }
    for rank in ranks:
        alone = totals_of(rank.events(), tmp_path / "alone.json")
        assert alone == {"": merged[f"process {rank.pid}, GPU {rank.device}"]}


def test_ranks_that_use_two_devices_each(tmp_path: Path) -> None:
    ranks = [Rank(), Rank(200, 1, 1, 1.5, 330)]
    second = [{**event, "ts": event["ts"] + 20_000} for event in Rank(100, 2, 2).events()]
    moved = []
    for event in second:
        number = event.get("args", {}).get("correlation")
        args = {**event["args"], "correlation": number + 100} if number else {}
        moved.append({**event, "args": args})
    merged = totals_of([*ranks[0].events(), *moved, *ranks[1].events()], tmp_path / "merged.json")
    assert set(merged) == {"process 100, GPU 0", "process 100, GPU 2", "process 200, GPU 1"}
    assert merged["process 100, GPU 0"][0] == 4
    assert merged["process 200, GPU 1"] == scaled(1.5)


@pytest.mark.parametrize("device", [0, 1])
def test_mixed_traces_with_the_same_ids_are_split_by_a_guess(device: int, tmp_path: Path) -> None:
    file = tmp_path / "merged.json"
    ranks = [Rank().events(), Rank(200, device, device, 1.5, 330).events()]
    for order in ORDERS:
        file.write_text(json.dumps({"traceEvents": order(ranks)}))
        traces = read_chrome_devices(file, {}).values()
        assert {trace.is_guess for trace in traces} == {order is by_time}


def test_operators_of_several_processes_are_separate_in_traces_of_the_cpu(tmp_path: Path) -> None:
    events = [
        {"cat": "cpu_op", "name": "aten::mm", "pid": pid, "tid": 2, "ts": ts, "dur": took}
        for pid, ts, took in ((100, 0, 50), (200, 10, 75), (200, 110, 75))
    ]
    assert totals_of(events, tmp_path / "cpu.json") == {
        "process 100": (None, {"": 50.0}),
        "process 200": (None, {"": 150.0}),
    }


CATEGORIES = (
    "cuda_runtime",
    "cuda_driver",
    "xpu_runtime",
    "xpu_driver",
    "mtia_runtime",
    "glow_runtime",
    "privateuse1_runtime",
    "privateuse1_driver",
    "hpu_runtime",
    "Runtime",
    "a_later_name",
)


@pytest.mark.parametrize("category", CATEGORIES)
def test_launches_are_found_by_their_ids_whatever_the_device_is(
    category: str, tmp_path: Path
) -> None:
    assert totals_of(Rank(category=category).events(), tmp_path / "one.json") == {"": scaled(1)}


@pytest.mark.parametrize("category", ["hpu_op", "mtia_ccp_events", "Kernel", "gpu_memcpy"])
def test_work_of_other_devices_is_work(category: str, tmp_path: Path) -> None:
    events = [
        {**event, "cat": category if event["cat"] == "kernel" else event["cat"]}
        for event in Rank(category="hpu_runtime").events()
    ]
    assert totals_of(events, tmp_path / "one.json") == {"": scaled(1)}


def test_a_later_event_of_the_device_with_the_same_id_is_no_launch(tmp_path: Path) -> None:
    """Kineto gives waits (`cuda_sync`) and annotations of the device the ids of launches."""
    events = Rank().events()
    for event in Rank().events():
        if event["cat"] == "kernel":
            sync = {**event, "cat": "cuda_sync", "ts": event["ts"] + 900, "dur": 1}
            events.append(sync)
    assert totals_of(events, tmp_path / "one.json") == {"": scaled(1)}


def test_an_id_of_0_leads_to_no_launch(tmp_path: Path) -> None:
    events = Rank().events()
    for event in events:
        if "args" in event:
            event["args"]["correlation"] = 0
    assert totals_of(events, tmp_path / "one.json") == {"": (2, {"": 330.0})}


def test_ranks_of_equal_process_ids_are_called_mixed(tmp_path: Path) -> None:
    """Each rank of a job in containers may have process 1."""
    path = tmp_path / "t.json"
    for ranks in ([Rank()], [Rank(), Rank(begin=330.0)]):
        events = [event for rank in ranks for event in rank.events()]
        path.write_text(json.dumps({"traceEvents": events}))
        (trace,) = read_chrome_devices(path, {}).values()
        assert trace.is_guess == (len(ranks) > 1)
