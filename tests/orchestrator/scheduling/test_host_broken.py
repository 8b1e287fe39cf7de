"""Hosts that can measure nothing: each costs the cells it has, and gets no others."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions as ray_exceptions
from click.testing import Result

from orchestrator.execution import host_probe as probe
from orchestrator.execution import measurement
from orchestrator.execution.events import AttemptStarted, DeviceLost
from orchestrator.execution.host_probe import host_failure
from orchestrator.execution.measurement import Slot
from orchestrator.scheduling.cluster import NodeHealth
from orchestrator.scheduling.ray_scheduler import RayScheduler
from orchestrator.scheduling.serial import SerialScheduler
from orchestrator.store.run import Run
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status
from tests.conftest import sweep_command
from tests.killing import own_temporary_folder
from tests.orchestrator.scheduling.test_ray_scheduler import cluster_of_hosts, rows_of_good_cells
from tests.support.fake_sweep import ListQueue
from tests.support.sick import FOLDER, NO_TORCH

CONFIG = """
name: sick
limits: {attempts: 1}
grids:
  - task: accumulation
    fixed: {device: cpu, count: 1}
    axes: {seed: [0, 1, 2, 3, 4, 5]}
"""
# A sitecustomize.py for a node: Ray's agent that unpacks the program finds no space.
NO_SPACE = """
import pathlib, shutil, sys

def fail(*asked, **how):
    raise OSError(28, "No space left on device")

if "runtime_env/agent" in " ".join(sys.orig_argv):
    shutil.rmtree = pathlib.Path.write_bytes = fail
"""
# A sitecustomize.py for a node: its workers end when they start, or when they have a task.
NO_WORKER = """
import os, signal, sys, threading, time

def die():
    while not getattr(getattr(sys.modules.get("ray._private.worker"), "global_worker", None), "connected", False):
        time.sleep(0.02)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGSEGV)

if "default_worker.py" in " ".join(sys.orig_argv):
"""
FILES = {
    "torch": ("torch.py", f"raise ImportError({NO_TORCH!r})"),
    "code": ("sitecustomize.py", NO_SPACE),
    "exits": ("sitecustomize.py", NO_WORKER + "    os._exit(1)"),
    "crashes": ("sitecustomize.py", NO_WORKER + "    threading.Thread(target=die).start()"),
}
AT_ONCE = 2  # cells that may be on their way to a host before it is known to be broken
Rows = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Return a function that returns a PYTHONPATH with a fault."""
    for name, (file, text) in FILES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
    with own_temporary_folder(tmp_path) as environment:
        for variable, value in {**environment, FOLDER: str(tmp_path / "torch")}.items():
            monkeypatch.setenv(variable, value)
        yield lambda name: f"{tmp_path / name}:{environment['PYTHONPATH']}"


@pytest.fixture
def join_broken(
    broken: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Return a function that makes a broken host join a cluster."""

    def join_it(join: Callable[..., Any], fault: str) -> None:
        with monkeypatch.context() as patch:
            patch.setenv("PYTHONPATH", broken(fault))
            join(num_cpus=1)

    return join_it


def run_on(
    cluster: Any, config: Path, module: str = "tests.support.sick"
) -> subprocess.CompletedProcess[str]:
    words = [
        sys.executable,
        "-m",
        module,
        "run",
        config,
        "--address",
        cluster.address,
        "--cpu-cells",
        str(AT_ONCE),
    ]
    return subprocess.run(
        words, cwd=config.parent, env={**os.environ}, capture_output=True, text=True, timeout=170
    )


def rows(folder: Path) -> Rows:
    """Return status and evidence of each attempt, in the order of their start."""
    attempts = Run(folder).read("attempts").sort_values("started_at")
    return [
        (status, json.loads(text))
        for status, text in zip(attempts["status"], attempts["evidence"], strict=True)
    ]


def lost(found: Rows) -> list[dict[str, Any]]:
    return [evidence for status, evidence in found if status == "lost"]


def is_of_a_crashed_worker(evidence: dict[str, Any]) -> bool:
    # On a full disk Ray's own worker cannot write either. It died of that once in ten times.
    return str(evidence["message"]).startswith("its supervisor went away: WorkerCrashedError")


@pytest.mark.ray
@pytest.mark.parametrize(
    ("sick", "ended_as", "fault"),
    [("torch", "crashed", f"ImportError: {NO_TORCH}"), ("disk", "lost", "File too large")],
)
def test_other_hosts_measure_the_rest_and_the_next_run_repeats_the_lost_cells(
    sick: str,
    ended_as: str,
    fault: str,
    broken: Callable[[str], str],
    write_config: Callable[..., Path],
    tmp_path: Path,
    sweep_here: Callable[..., Result],
) -> None:
    path, run = write_config(CONFIG), tmp_path / "results" / "sick"
    with cluster_of_hosts() as (cluster, join):
        join(num_cpus=1, labels={"sick": sick})
        join(num_cpus=1)
        done = run_on(cluster, path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(
        rf"host .*: .*{fault}.*: it gets no other cell\. Mend what `sweep doctor` says there",
        done.stdout,
    )
    assert done.stdout.count("it gets no other cell") == 1
    gone = lost(rows(run))
    assert 1 <= len(gone) <= AT_ONCE
    assert sorted(status for status, _ in rows(run)) == ["lost"] * len(gone) + ["ok"] * (
        6 - len(gone)
    )
    diagnosed = [
        evidence for evidence in gone if sick == "torch" or not is_of_a_crashed_worker(evidence)
    ]
    assert diagnosed
    for evidence in diagnosed:
        assert evidence["cell_ended_as"] == ended_as
        assert fault in evidence["host_fault"]
        assert evidence["message"].startswith("nothing is measured on its host: host ")
    untouched = rows_of_good_cells(run)
    # A cell has one attempt. A lost attempt does not count.
    done_again = sweep_here("run", path, "--scheduler", "serial")
    assert (done_again.exit_code, f": {len(gone)} ok; results in" in done_again.output) == (
        0,
        True,
    ), done_again.output
    assert rows_of_good_cells(run)[: len(untouched)] == untouched


@pytest.mark.ray
def test_a_run_without_a_working_host_stops_and_the_next_run_continues(
    broken: Callable[[str], str],
    write_config: Callable[..., Path],
    tmp_path: Path,
    sweep_here: Callable[..., Result],
) -> None:
    path, run = write_config(CONFIG), tmp_path / "results" / "sick"
    with cluster_of_hosts() as (cluster, join):
        join(num_cpus=1, labels={"sick": "torch"})
        join(num_cpus=1, labels={"sick": "disk"})
        done = run_on(cluster, path)
    assert done.returncode == 2, done.stdout + done.stderr
    said = done.stdout + done.stderr
    assert re.search(
        r"no host is left that measures: host .*; host .*\. Mend what .* there, and run again: finished cells",
        said,
    ), said
    statuses = [status for status, _ in rows(run)]
    assert 2 <= len(statuses) <= 2 * AT_ONCE
    assert set(statuses) == {"lost"}
    assert f"{6 - len(statuses)} cells left. To continue: sweep" in said, said
    done_again = sweep_here("run", path, "--scheduler", "serial")
    assert (done_again.exit_code, "measured 6 cells: 6 ok" in done_again.output) == (0, True), (
        done_again.output
    )


@pytest.mark.ray
@pytest.mark.parametrize(
    ("sick", "fault"),
    [
        ("torch", NO_TORCH),
        ("code", "does not receive this program: .*No space left"),
        ("exits", "no answer came from there in 40 s"),
        ("crashes", "Ray's workers crash there"),
    ],
)
def test_a_host_that_is_broken_from_the_start_costs_no_cell(
    sick: str,
    fault: str,
    join_broken: Callable[..., None],
    write_config: Callable[..., Path],
    tmp_path: Path,
) -> None:
    path = write_config(CONFIG)
    with cluster_of_hosts() as (cluster, join):
        join(num_cpus=1)
        join_broken(join, sick)
        done = run_on(cluster, path, "tests.support.impatient")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"host .*: .*{fault}.*: it gets no other cell", done.stdout), done.stdout
    assert sick != "exits" or re.search("waiting for .* to answer, for up to 40 s", done.stdout), (
        done.stdout
    )
    assert "measured 6 cells: 6 ok" in done.stdout
    assert [status for status, _ in rows(tmp_path / "results" / "sick")] == ["ok"] * 6
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.ray
def test_a_broken_host_that_joins_costs_only_the_cells_it_was_given(
    join_broken: Callable[..., None],
    write_config: Callable[..., Path],
    tmp_path: Path,
    sweep_here: Callable[..., Result],
) -> None:
    # Long enough that some cells are left when the host has joined.
    path, run = (
        write_config(CONFIG.replace("count: 1}", "count: 500000}")),
        tmp_path / "results" / "sick",
    )
    words = sweep_command("run", path, "--address")
    with cluster_of_hosts() as (cluster, join):
        join(num_cpus=1)
        driver = subprocess.Popen(
            [*words, cluster.address, "--cpu-cells", str(AT_ONCE)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
        )
        while not (run / "run.json").exists() and driver.poll() is None:
            time.sleep(0.05)
        join_broken(join, "code")
        said, _ = driver.communicate(timeout=100)
    assert driver.returncode == 1, said
    assert said.count("it gets no other cell") == 1, said
    assert 1 <= len(lost(rows(run))) <= AT_ONCE
    assert all("RuntimeEnvSetupError" in evidence["message"] for evidence in lost(rows(run)))
    assert {status for status, _ in rows(run)} == {"ok", "lost"}
    assert sweep_here("run", path, "--scheduler", "serial").exit_code == 0


class Nodes:
    """A fake Ray on whose node `sick` no task begins, or on which workers crash later."""

    exceptions = ray_exceptions

    def __init__(self, *names: str, begins: bool) -> None:
        self._nodes = [
            {
                "NodeID": name,
                "NodeManagerHostname": name,
                "Alive": True,
                "Resources": {"CPU": 1.0},
                "Labels": {},
            }
            for name in names
        ]
        self._begins = begins

    def nodes(self) -> list[dict[str, Any]]:
        return self._nodes

    def remote(self, **how: Any) -> Any:
        def on(label_selector: dict[str, str]) -> SimpleNamespace:
            return SimpleNamespace(remote=lambda: next(iter(label_selector.values())))

        return lambda question: SimpleNamespace(options=on)

    def wait(self, asked: list[str], **how: Any) -> tuple[list[str], list[str]]:
        return asked, []

    def get(self, asked: Any, timeout: float = 0.0) -> None:
        if asked == "sick" and not self._begins:
            raise ray_exceptions.WorkerCrashedError

    def cancel(self, asked: str, force: bool) -> None: ...


@pytest.mark.parametrize(
    ("nodes", "begins", "crashes", "is_excluded"),
    [
        (("well", "sick"), False, 1, True),  # no task begins there
        (("well", "sick"), True, 2, False),  # bad luck
        (("well", "sick"), True, 3, True),
        (("sick",), False, 3, False),  # no other host could replace it
    ],
)
def test_a_host_whose_workers_crash_three_times_is_excluded(
    nodes: tuple[str, ...],
    begins: bool,
    crashes: int,
    is_excluded: bool,
    make_attempt: Callable[..., Attempt],
    capsys: Any,
) -> None:
    def crash() -> Iterator[None]:
        raise ray_exceptions.WorkerCrashedError
        yield

    scheduler = RayScheduler.__new__(RayScheduler)
    ray = Nodes(*nodes, begins=begins)
    health = NodeHealth(ray, print)
    vars(scheduler).update(_ray=ray, _health=health)
    started = AttemptStarted(make_attempt(), "sick", "", time.monotonic(), "sick")
    for _ in range(crashes):
        outcome = scheduler._next_event(crash(), started)
        assert isinstance(outcome, Outcome)
        assert outcome.status is Status.LOST
    assert ("sick" in health.excluded) == is_excluded
    assert (
        capsys.readouterr().out.count("host sick: Ray's workers crash there: it gets no other cell")
        == is_excluded
    )


@pytest.mark.process
def test_a_new_process_checks_whether_this_host_can_measure(
    broken: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert host_failure(tmp_path / "cell" / "1") is None
    (tmp_path / "file").touch()
    assert "Not a directory" in str(host_failure(tmp_path / "file" / "cell" / "1"))
    monkeypatch.setenv("PYTHONPATH", broken("torch"))
    assert NO_TORCH in str(host_failure(tmp_path / "cell" / "1"))


@pytest.mark.parametrize(
    ("answers", "fault"), [(["late", None], None), (["late", "full"], "full"), ([None], None)]
)
def test_a_host_is_checked_twice_before_it_counts_as_broken(
    answers: list[str | None], fault: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = iter(answers)
    monkeypatch.setattr(probe, "_failure", lambda words, variables: next(said))
    assert host_failure(tmp_path / "cell" / "1") == fault
    assert not list(said)


@pytest.mark.parametrize(
    ("status", "stage", "message", "asked"),
    [
        (Status.FAILED, "start", "No module named 'torch'", True),
        (Status.CRASHED, "", "exited with code 1 without a word", True),
        (Status.LOST, "", "its folder cannot be written", True),
        (Status.FAILED, "timing synced", "[Errno 28] No space left on device", True),
        (Status.FAILED, "timing synced", "[Errno 122] Disk quota exceeded", True),
        (Status.FAILED, "build", "wrong on purpose", False),
        (Status.SKIPPED, "start", "impossible", False),
        (Status.OK, "", "", False),
    ],
)
def test_a_host_is_checked_after_ends_that_may_be_its_fault(
    status: Status,
    stage: str,
    message: str,
    asked: bool,
    make_attempt: Callable[..., Attempt],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended = Outcome(make_attempt(1), status, stage, "", {"message": message}, {}, (), 0.0, 1.0)
    monkeypatch.setattr(measurement, "execute", lambda attempt: ended)
    monkeypatch.setattr(measurement, "host_failure", lambda folder: None)
    assert measurement.measure(ended.attempt, Slot(1)) == ended
    monkeypatch.setattr(measurement, "host_failure", lambda folder: "it is full")
    event = measurement.measure(ended.attempt, Slot(1))
    assert isinstance(event, DeviceLost) == asked
    assert (
        not isinstance(event, DeviceLost)
        or event.lost_outcome.facts["host"] in event.lost_outcome.evidence["message"]
    )  # and so redacted
    assert list(SerialScheduler(print).run(ListQueue([ended.attempt]), lambda started: None)) == [
        ended
    ]
    assert ("it is full. Mend what `sweep doctor` says there" in capsys.readouterr().out) == asked
