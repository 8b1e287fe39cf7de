"""Cells that use several GPUs of one host. No real task does, so a fake task is registered."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pynvml
import pytest
from click.testing import Result

from orchestrator.cli.text.sweep_result import conclude
from orchestrator.common.errors import ConfigError, NoGpuLeft, PlatformError
from orchestrator.execution import measurement
from orchestrator.execution.events import AttemptStarted, DeviceLost
from orchestrator.hardware.host import GpuInfo, HostInfo
from orchestrator.planning.attempt_queue import AttemptQueue
from orchestrator.planning.cell_decisions import leave_out_wider, make_plan, most_gpus
from orchestrator.planning.duration_estimate import (
    DurationConditions,
    DurationEstimator,
    expect,
    makespan_s,
)
from orchestrator.planning.invocation import RunOptions
from orchestrator.planning.preflight import Preflight, Slots
from orchestrator.planning.request import SweepRequest
from orchestrator.scheduling import ray_placement, serial
from orchestrator.scheduling.ray_scheduler import RayScheduler
from orchestrator.scheduling.ray_task import SweepHosts, supervise
from orchestrator.scheduling.serial import SerialScheduler
from orchestrator.store.run import Run
from orchestrator.sweep.outcome_log import SweepResult
from tasks.spec.attempt import Attempt, Settings
from tasks.spec.axes import axis
from tasks.spec.cell import Cell
from tasks.spec.outcome import Outcome
from tasks.spec.parameters import RankedParams
from tasks.spec.registry import Task, all_tasks, make_cell
from tasks.spec.status import Status
from tests.conftest import ROOT
from tests.killing import own_temporary_folder
from tests.support.fake_sweep import (
    FakeScheduler,
    ListQueue,
    go,
    outcome_of,
    request_for,
    state_of,
    status_lines,
)

CONFIG = """
name: several
grids:
  - task: wide
    axes: {gpus: [1, 2, 4], seed: [0, 1]}
"""


class WideParams(RankedParams):
    seconds: float = axis(1.0, "seconds that a step takes")


def build(params: WideParams) -> Any:
    raise AssertionError("it is never measured")


@pytest.fixture(autouse=True)
def task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        all_tasks(),
        "wide",
        Task("wide", 1, WideParams, build, lambda params: params.seconds * 1e13),
    )  # type: ignore[index]


def cell(**values: Any) -> Cell:
    return make_cell("wide", values)


def attempt_at(tmp_path: Path, number: int = 1, **values: Any) -> Attempt:
    made = cell(**values)
    return Attempt(
        made, number, str(tmp_path / "run" / "artifacts" / made.id / str(number)), Settings()
    )


def test_a_cell_has_its_number_of_gpus_and_none_on_the_cpu() -> None:
    assert [
        cell(gpus=2).params.gpu_count,
        cell().params.gpu_count,
        cell(device="cpu").params.gpu_count,
    ] == [2, 1, 0]
    assert cell(gpus=2, device="cpu").id == cell(device="cpu").id
    assert cell(gpus=1).id == cell().id
    assert make_cell("matmul", {}).params.gpu_count == 1


@pytest.mark.parametrize("gpus", ["0", "two", "1.5"])
def test_a_number_of_gpus_that_is_no_positive_integer_is_refused(
    gpus: str, write_config: Callable[..., Path]
) -> None:
    with pytest.raises(ConfigError, match=r"axes\.gpus|gpus"):
        request_for(write_config(CONFIG.replace("[1, 2, 4]", f"[{gpus}]")), [], [], None)


def test_a_task_for_one_gpu_has_no_axis_gpus(
    write_config: Callable[..., Path],
) -> None:
    with pytest.raises(ConfigError, match="matmul has no axis 'gpus'"):
        request_for(write_config(CONFIG.replace("task: wide", "task: matmul")), [], [], None)


def test_estimates_count_all_gpus_of_a_cell() -> None:
    assert makespan_s([4, 3, 2], 2, widths=[2, 1, 1]) == 4 + 3
    assert makespan_s([3, 4], 2, widths=[1, 2]) == 3 + 4  # it waits for both
    assert makespan_s([4], 2, busy_s=[5, 5, 5], widths=[8]) == 9
    cells = [cell(gpus=4), cell(seed=1), cell(seed=2)]
    history = {
        one.id: state_of((Status.OK,), (seconds,))
        for one, seconds in zip(cells, (100.0, 50.0, 50.0), strict=True)
    }
    found = expect(
        DurationEstimator(cells, history, DurationConditions("NVIDIA H200", True, True)),
        cells,
        {"cuda": 4},
    )
    assert found is not None
    assert (found.wall_s, found.gpu_s) == (150, 4 * 100 + 50 + 50)


def test_cells_with_most_gpus_come_first(tmp_path: Path) -> None:
    cells = [cell(seconds=9.0), cell(gpus=2), cell(gpus=4), cell(gpus=2, seconds=3.0)]
    plan = make_plan(cells, {}, RunOptions(), 3)
    queue = AttemptQueue(plan, Run(tmp_path), Settings())
    host = HostInfo(gpus=(GpuInfo("NVIDIA H200", 1),))
    queue.begin(Preflight(hosts=(host,), slots=Slots({"cuda": 4})))
    assert [(one.cell.params.gpu_count, one.cell.params.values()["seconds"]) for one in queue] == [
        (4, 1.0), (2, 3.0), (2, 1.0), (1, 9.0),
    ]  # fmt: skip


class Host:
    """A fake host with four GPUs. GPUs in `falls` fail under the next attempt on them."""

    def __init__(self) -> None:
        self.gpus = {str(number): f"uuid-{number}" for number in range(4)}
        self.answering = set(self.gpus.values())
        self.falls: set[str] = set()

    @property
    def known(self) -> dict[str, dict[str, str]]:
        return {socket.gethostname(): self.gpus}

    def probe(self, server: object = None) -> HostInfo:
        gpus = tuple(GpuInfo("NVIDIA H200", 1, uuid) for uuid in self.gpus.values())
        return HostInfo(name=socket.gethostname(), gpus=gpus)

    def measure(self, attempt: Attempt) -> Outcome:
        visible = attempt.settings.env.get("CUDA_VISIBLE_DEVICES") or os.environ.get(
            "CUDA_VISIBLE_DEVICES", "all"
        )
        struck = {self.gpus[name] for name in self.falls & set(visible.split(","))}
        self.answering -= struck
        facts = {"visible_devices": visible, "cores": attempt.settings.cores}
        return Outcome(
            attempt, Status.FAILED if struck else Status.OK, "", "", {}, facts, (), 0.0, 0.0
        )

    def handle_of(self, uuid: str) -> str:
        if uuid.removeprefix("GPU-") not in self.answering:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
        return uuid


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host()
    cores = {"0": (0, 1), "1": (2, 3), "2": (4,), "3": None}
    monkeypatch.setattr(measurement, "execute", made.measure)
    monkeypatch.setattr(measurement, "cores_for", lambda name, known: cores[name])
    monkeypatch.setattr(serial, "probe_here", made.probe)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", made.handle_of)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda gpu: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return made


@pytest.mark.parametrize(
    ("visible", "cores", "uuids"),
    [
        ("0,2", (0, 1, 4), ["uuid-0", "uuid-2"]),
        ("2,3", None, ["uuid-2", "uuid-3"]),  # GPU 3 has no cores near it: no pinning
        ("1", (2, 3), None),
    ],
)
def test_a_cell_has_the_cores_of_all_its_gpus_and_records_them(
    tmp_path: Path,
    host: Host,
    monkeypatch: pytest.MonkeyPatch,
    visible: str,
    cores: object,
    uuids: object,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    attempt = attempt_at(tmp_path, gpus=len(visible) // 2 + 1)
    _, outcome = supervise(attempt, 5, SweepHosts("", host.known))
    assert isinstance(outcome, Outcome)
    assert (outcome.facts["cores"], outcome.facts.get("gpu_uuids")) == (cores, uuids)


def serially(tmp_path: Path, *gpus: int) -> Iterator[Outcome]:
    scheduler = SerialScheduler(print)
    scheduler.hosts()
    attempts = [attempt_at(tmp_path, number, gpus=many) for number, many in enumerate(gpus)]
    yield from scheduler.run(ListQueue(attempts), lambda started: None)


def test_serial_cells_use_the_first_gpus_that_work(tmp_path: Path, host: Host) -> None:
    host.falls = {"1"}
    outcomes = [
        (one.status, one.facts["visible_devices"]) for one in serially(tmp_path, 1, 2, 3, 2)
    ]
    assert outcomes == [
        (Status.OK, "all"),
        (Status.LOST, "0,1"),
        (Status.OK, "0,2,3"),
        (Status.OK, "0,2"),
    ]


def test_a_failed_gpu_is_named_and_a_run_with_too_few_gpus_ends(tmp_path: Path, host: Host) -> None:
    host.falls = {"2"}
    outcomes = serially(tmp_path, 4, 1, 4)
    lost = next(outcomes)
    assert lost.evidence["gpu_uuid"] == "uuid-2"
    assert lost.evidence["message"].startswith("its GPU went away: GPU 2 (uuid-2) of ")
    assert next(outcomes).status is Status.OK
    with pytest.raises(
        NoGpuLeft,
        match=r"no host is left with 4 GPUs that work: GPU 2 \(uuid-2\) of .*Reset the GPU",
    ):
        next(outcomes)


def hosts_with(*counts: int) -> FakeScheduler:
    scheduler = FakeScheduler(outcome_of)
    gpus = [
        tuple(GpuInfo("NVIDIA H200", 1, f"{count} {one}") for one in range(count))
        for count in counts
    ]
    mark = {"cuda": [{"gpu": "NVIDIA H200"}]}
    scheduler.hosts = lambda: [HostInfo(name=str(own), gpus=own, fingerprints=mark) for own in gpus]  # type: ignore[method-assign]
    return scheduler


def test_cells_that_no_host_has_enough_gpus_for_are_skipped(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    messages: list[str] = []

    def request(*sets: str) -> SweepRequest:
        return request_for(write_config(CONFIG), sets, [], tmp_path / "out")

    result = go(request(), hosts_with(1, 2, 1), messages=messages)
    assert result.counts == {Status.OK: 4}
    assert conclude(result, "again", "again")[1] == 0
    line = "2 cells need more GPUs than one host has: 4 GPUs (at most 2)"
    assert f"skipped: {line}. The same command measures them on such a host" in messages
    status = status_lines(request().run)
    assert status[:2] == ["     4 ok", "     2 pending"]
    left = "nothing is left to measure of 6 cells; 2 cells need another host: sweep run "
    assert status[2].startswith(left)
    assert status[3] == "needs more GPUs than a host has: 2 cells with 4 GPUs"
    assert len(status) == 6
    with pytest.raises(PlatformError, match=f"{re.escape(line)}. Add such a node"):
        go(request(), hosts_with(1, 2, 1))
    assert go(request(), hosts_with(4)).counts == {Status.OK: 2}


def test_a_plan_lists_the_cells_that_need_more_gpus_than_are_here(
    write_config: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    sweep_here: Callable[..., Result],
) -> None:
    monkeypatch.setattr("orchestrator.hardware.nvml.gpu_names", lambda: ["NVIDIA H200"] * 2)
    monkeypatch.setattr("orchestrator.cli.text.plan.gpu_names", lambda: ["NVIDIA H200"] * 2)
    path = write_config(CONFIG.replace("4]", "4, 8]"))
    lines = sweep_here("plan", path).output.splitlines()
    assert "4 to run" in lines
    heading = "needs more GPUs than a host has: 2 cells with 4 GPUs, 2 cells with 8 GPUs"
    assert len(lines[lines.index(heading) :]) == 5
    assert sum(line.startswith("  run ") for line in lines) == 4
    found = json.loads(sweep_here("plan", path, "--format", "json").output)
    assert [one["action"] for one in found] == ["run"] * 4 + ["defer"] * 4
    assert found[-1]["reason"] == "needs more GPUs than a host has"
    # Nothing is known about hosts with another GPU, nor on a machine without any.
    assert "8 to run" in sweep_here("plan", path, "--gpu", "H100").output.splitlines()
    monkeypatch.setattr("orchestrator.hardware.nvml.gpu_names", list)
    assert "8 to run" in sweep_here("plan", path).output.splitlines()


def test_a_kind_of_gpu_counts_by_itself() -> None:
    hosts = [{"NVIDIA H200": 2}, {"NVIDIA A100-SXM4-80GB": 8}]
    asked = [cell(gpus=4), cell(gpus=4, gpu_kind="H200"), cell(gpus=4, gpu_kind="B200")]
    assert [most_gpus(hosts, one) for one in asked] == [8, 2, 0]


def test_a_cell_with_one_gpu_of_a_kind_that_is_not_here_needs_no_more_gpus() -> None:
    cells = [cell(gpus=gpus, gpu_kind="B200") for gpus in (1, 2)]
    plan = leave_out_wider(make_plan(cells, {}, RunOptions(), 3), [{"NVIDIA H200": 8}])
    assert plan.too_wide == {cells[1].id: cells[1]}


@pytest.mark.ray
def test_all_gpus_of_a_cell_are_on_one_node_and_no_cell_starves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run cells of 3, 3, 3, 2 and 1 GPUs on two nodes with five fake GPUs each.

    The third cell waits for one of the first two, because no node has three free GPUs. A node is
    reserved: the fourth starts on the other node, until which the first two go on. The fifth, whose
    duration is unknown, waits. No GPU has two cells at a time.
    """
    import ray
    from ray.cluster_utils import Cluster

    def say_where(
        attempt: Attempt, cpus: int, gpus: object, mark: str
    ) -> Iterator[AttemptStarted | Outcome | DeviceLost]:
        import os
        import socket
        import time

        import ray

        here, began = ray.get_runtime_context(), time.time()
        names = here.get_accelerator_ids()["GPU"]
        yield AttemptStarted(attempt, socket.gethostname(), "", 0.0)
        begun = Path(attempt.folder).parents[1]
        begun.mkdir(parents=True, exist_ok=True)
        (begun / f"begun {attempt.number}").touch()
        while attempt.number < 2 and not (begun / "begun 3").exists():
            time.sleep(0.05)
        time.sleep(0.2)
        facts = {
            "node": here.get_node_id(),
            "gpus": names,
            "visible": os.environ["CUDA_VISIBLE_DEVICES"],
            "cpus": cpus,
        }
        outcome = Outcome(attempt, Status.OK, "", "", {}, facts, (), began, time.time() - began)
        yield (
            outcome
            if attempt.number < 100
            else DeviceLost(outcome, outcome, "GPU 0 of here: gone", "0")
        )
        if attempt.number >= 100:
            time.sleep(1000)

    monkeypatch.setattr("orchestrator.scheduling.ray_scheduler.supervise", say_where)
    widths = [3, 3, 3, 2, 1]
    with own_temporary_folder(tmp_path) as environment:
        monkeypatch.setenv("TMPDIR", environment["TMPDIR"])
        monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the task is in this file
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 10, "num_gpus": 5})
        try:
            cluster.add_node(num_cpus=10, num_gpus=5)
            scheduler = RayScheduler(print, cluster.address)

            def run(*attempts: Attempt) -> list[Outcome]:
                outcomes = scheduler.run(ListQueue(attempts), lambda started: None)
                return sorted(outcomes, key=lambda one: one.attempt.number)

            attempts = [
                attempt_at(tmp_path, number, gpus=width, seed=number)
                for number, width in enumerate(widths)
            ]
            outcomes = run(*attempts)
            assert [one.status for one in outcomes] == [Status.OK] * 5, [
                one.evidence for one in outcomes
            ]
            assert [len(one.facts["gpus"]) for one in outcomes] == widths
            assert [one.facts["visible"].split(",") for one in outcomes] == [
                one.facts["gpus"] for one in outcomes
            ]
            assert [one.facts["cpus"] for one in outcomes] == [2 * width for width in widths]
            assert not list(overlapping(outcomes))
            first, second, third, fourth, fifth = outcomes
            ends = [one.started_at + one.wall_s for one in outcomes]
            assert third.started_at >= min(ends[:2])
            assert fifth.started_at >= min(ends[:2] + ends[3:4])
            assert fourth.facts["node"] == second.facts["node"] != first.facts["node"]
            time.sleep(ray_placement._RELEASE_S)
            other_program = ray.remote(num_gpus=3)(lambda: time.sleep(600)).remote()
            while ray.available_resources()["GPU"] > 7:
                time.sleep(0.1)
            attempts = [attempt_at(tmp_path, 5 + one, gpus=3, seed=one) for one in range(2)]
            first, second = run(*attempts)  # neither waits for the other program
            assert first.facts["node"] == second.facts["node"]
            ray.cancel(other_program, force=True)
            one_node = attempt_at(tmp_path, 100, gpus=2)
            assert [one.attempt for one in run(one_node)] == [one_node]
            assert scheduler.slots("cuda") == 8
            assert [one.status for one in run(attempt_at(tmp_path, 9, gpus=4))] == [Status.OK]
            run(attempt_at(tmp_path, 101, gpus=4))
            lost = "no host is left with 4 GPUs that work: GPU 0 of here: gone"
            with pytest.raises(NoGpuLeft, match=lost):
                run(attempt_at(tmp_path, 9, gpus=4))
            # What can run is measured before.
            assert [one.status for one in run(attempt_at(tmp_path, 9, gpus=3))] == [Status.OK]
            scheduler.close()
        finally:
            ray.shutdown()
            cluster.shutdown()


def overlapping(outcomes: list[Outcome]) -> Iterator[tuple[int, int]]:
    """Yield pairs of attempts that had a GPU at the same time."""
    for one in outcomes:
        for other in outcomes:
            same = one.facts["node"] == other.facts["node"] and set(one.facts["gpus"]) & set(
                other.facts["gpus"]
            )
            if same and one.attempt.number < other.attempt.number:
                first, second = sorted((one, other), key=lambda each: each.started_at)
                if first.started_at + first.wall_s > second.started_at:
                    yield one.attempt.number, other.attempt.number


@pytest.mark.ray
def test_a_sweep_on_two_nodes_uses_both_and_loses_nothing_with_one(
    write_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run cells of 1, 2 and 4 GPUs on nodes with two fake GPUs each, of which one goes away.

    A cell with 4 GPUs is left to another run. The node goes away under a cell with 2 GPUs, which
    the next run measures on the other node, and no other cell.
    """
    import ray
    from ray.cluster_utils import Cluster

    doomed, begun = tmp_path / "doomed", tmp_path / "begun"

    def say_where(
        attempt: Attempt, cpus: int, gpus: object, mark: str
    ) -> Iterator[AttemptStarted | Outcome]:
        import socket
        import time

        import ray

        here, began = ray.get_runtime_context(), time.time()
        names = here.get_accelerator_ids()["GPU"]
        yield AttemptStarted(attempt, socket.gethostname(), "", 0.0)
        if len(names) == 2 and doomed.exists() and doomed.read_text() == here.get_node_id():
            begun.touch()
            time.sleep(600)
        time.sleep(0.3)
        facts = {"node": here.get_node_id(), "gpus": names}
        done = outcome_of(attempt)
        took_s = time.time() - began
        yield replace(done, facts=facts, started_at=began, wall_s=took_s)

    monkeypatch.setattr("orchestrator.scheduling.ray_scheduler.supervise", say_where)
    monkeypatch.setattr(RayScheduler, "import_ahead", lambda scheduler, attempt: None)
    # A fake GPU has no driver that could be asked about it.
    pair = (GpuInfo("NVIDIA H200", 1, "a"), GpuInfo("NVIDIA H200", 1, "b"))
    known = [
        HostInfo(name=name, gpus=pair, fingerprints={"cuda": [{"gpu": "NVIDIA H200"}]})
        for name in ("first", "second")
    ]
    monkeypatch.setattr(RayScheduler, "hosts", lambda scheduler: known)
    path = write_config(CONFIG.replace("[0, 1]", "[0, 1, 2, 3]"))
    run = Run(tmp_path / "out")

    def sweep(*seeds: int) -> SweepResult:
        chosen = f"seed={','.join(map(str, seeds))}"
        request = request_for(path, [chosen], [], tmp_path / "out")
        return go(request, RayScheduler(print, cluster.address), messages=messages)

    def measured() -> pd.DataFrame:
        attempts = run.read("attempts")
        params, facts = (attempts[name].map(json.loads) for name in ("params", "facts"))
        columns = {"gpus": params.str["gpus"].fillna(1), "node": facts.str["node"]}
        return attempts.assign(**columns, names=facts.str["gpus"])

    messages: list[str] = []
    with own_temporary_folder(tmp_path) as environment:
        monkeypatch.setenv("TMPDIR", environment["TMPDIR"])
        monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the task is in this file
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 2})
        try:
            other = cluster.add_node(num_cpus=4, num_gpus=2)
            result = sweep(0, 1)
            assert result.counts == {Status.OK: 4}
            assert conclude(result, "again", "again")[1] == 0
            line = "2 cells need more GPUs than one host has: 4 GPUs (at most 2)"
            assert f"skipped: {line}. The same command measures them on such a host" in messages
            rows = measured()
            assert sorted(rows["gpus"]) == [1, 1, 2, 2]
            assert rows["names"].map(len).tolist() == rows["gpus"].tolist()
            assert rows["node"].nunique() == 2
            doomed.write_text(other.node_id)
            remover = threading.Thread(target=remove_once, args=(cluster, other, begun))
            remover.start()
            result = sweep(2, 3)
            remover.join()
            assert result.counts == {Status.OK: 3, Status.LOST: 1}
            doomed.unlink()
            before = measured()
            (lost,) = before[before["status"] == "lost"].to_dict("records")
            assert lost["gpus"] == 2
            assert re.search("its (supervisor|node) went away", lost["evidence"])
            assert sweep(2, 3).counts == {Status.OK: 1}
            after = measured()
            (again,) = after[after["cell"].eq(lost["cell"]) & after["attempt"].eq(2)].to_dict(
                "records"
            )
            assert (again["status"], again["gpus"]) == ("ok", 2)
            assert again["node"] != other.node_id
            assert len(after) == len(before) + 1 == 9  # no finished cell was measured again
        finally:
            ray.shutdown()
            cluster.shutdown()


def remove_once(cluster: Any, node: Any, begun: Path) -> None:
    """Remove a node from its cluster once a cell has begun there."""
    deadline = time.monotonic() + 120
    while not begun.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    cluster.remove_node(node, allow_graceful=False)
