"""Sweeps on Ray as a user runs them: faults, kills, Ctrl-C, time limits, and leftover processes."""

from __future__ import annotations

import io
import json
import os
import random
import re
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import psutil
import pytest
from click.testing import Result

from orchestrator.common.errors import NoNodeLeft, PlatformError
from orchestrator.execution.attempt_archive import AttemptArchive
from orchestrator.execution.events import AttemptStarted
from orchestrator.execution.exit_diagnosis import lost_outcome
from orchestrator.execution.host_probe import TIMEOUT_S
from orchestrator.scheduling.ray_scheduler import RayScheduler
from orchestrator.store.open import open_run
from orchestrator.store.run import Run
from tasks.process.phase_file import read_phase
from tasks.spec.attempt import ATTEMPT_FILE, LOG_FILE, PHASE_FILE, PREPARATION_S, Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status
from tests.conftest import ROOT, sweep_command
from tests.killing import (
    asked_of_each,
    left_after,
    lost_and_repeated,
    measured_on_disk,
    own_temporary_folder,
)
from tests.support.fake_sweep import ListQueue
from tests.support.s3 import Bucket, serve

pytestmark = pytest.mark.ray

Sweep = Callable[..., "subprocess.CompletedProcess[str]"]
SweepHere = Callable[..., Result]  # faster, where the scheduler does not matter
TESTS = str(ROOT / "tests" / "support")
CONFIG = """
name: faults
limits: {timeout_s: 12, attempts: 2}
defaults: {device: cpu, context_length: 8, batch_size: 1, warmup_steps: 0, measured_steps: 2, vocab_size: 100}
grids:
  - task: train_step
    axes: {seed: [0, 1]}
    fixed: {size: tiny}
  - task: train_step
    fixed: {model: "misbehaving:Model"}
    axes:
      model_args: [%s]
"""


def config_of(*hows: str) -> str:
    return CONFIG % ", ".join(f"{{how: {how}, vocab_size: 100}}" for how in hows)


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    (tmp_path / "misbehaving.py").symlink_to(ROOT / "tests" / "support" / "misbehaving.py")
    with own_temporary_folder(tmp_path) as variables:
        yield variables


def statuses(folder: Path) -> dict[str, str]:
    cells = pd.read_parquet(folder / "cells.parquet")
    hows = [
        json.loads(args)["how"] if args != "{}" else f"good {seed}"
        for args, seed in zip(cells["model_args"], cells["seed"], strict=True)
    ]
    return dict(zip(hows, cells["status"], strict=True))


def wait_until_gone(tmp_path: Path, word: str = "") -> None:
    assert not left_after(tmp_path, 20, word)


@contextmanager
def cluster_of_hosts(head_cpus: int = 0) -> Iterator[tuple[Any, Callable[..., Any]]]:
    """Start a Ray cluster, and yield it with a function that makes another host join.

    Each host has its own temporary folder. In a shared one, a host that joins unpacks the program
    again while others run it.
    """
    import ray
    from ray.cluster_utils import Cluster

    bare = {"include_log_monitor": False, "include_dashboard": False}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": head_cpus, "no_monitor": True, **bare}
    )
    with ExitStack() as folders:

        def join(**options: Any) -> Any:
            own = tempfile.TemporaryDirectory(
                prefix="n-", dir="/tmp", ignore_cleanup_errors=True
            )  # a short path
            return cluster.add_node(**bare, temp_dir=folders.enter_context(own), **options)

        try:
            yield cluster, join
        finally:
            ray.shutdown()
            cluster.shutdown()


def test_each_fault_is_a_row_and_does_not_affect_other_cells(
    sweep: Sweep,
    sweep_here: SweepHere,
    write_config: Callable[..., Path],
    tmp_path: Path,
    environment: dict[str, str],
) -> None:
    hows = ["segfault", "leave", "unspeakable", "cuda_oom", "well"]
    path = write_config(config_of(*hows))
    with cluster_of_hosts(head_cpus=2) as (cluster, _):
        words = ["--address", cluster.address, "--cpu-cells", 2]
        done = sweep("run", path, *words, env=environment)
    assert done.returncode == 1, done.stdout + done.stderr
    assert statuses(tmp_path / "results" / "faults") == {
        "good 0": "ok", "good 1": "ok", "well": "ok",
        "segfault": "crashed", "leave": "crashed", "unspeakable": "failed", "cuda_oom": "oom",
    }  # fmt: skip
    wait_until_gone(tmp_path)
    again = sweep_here("run", path, "--scheduler", "serial")
    assert "measured 3 cells: 2 crashed, 1 failed" in again.output, again.output
    status = sweep_here("status", "results/faults")
    assert "killed by SIGSEGV" in status.stdout
    assert "nothing is left to measure of 7 cells" in status.stdout


OF_TWO_HOSTS = """
name: x
instruments: [timing, memory, kernels]
limits: {timeout_s: 60, attempts: 2}
defaults: {device: cpu, context_length: 8, batch_size: 1, warmup_steps: 1, measured_steps: 2, vocab_size: 100}
grids:
  - task: train_step
    axes: {seed: [0, 1, 2]}
    fixed: {model: "misbehaving:Model", model_args: {how: meet_another, vocab_size: 100, mark: %s}}
  - task: train_step
    fixed: {model: "misbehaving:Model", model_args: {how: fail, once: true, vocab_size: 100, mark: %s}}
    axes: {seed: [0]}
"""


def test_two_hosts_fill_a_bucket_and_a_second_driver_continues_from_it(
    sweep: Sweep, sweep_here: SweepHere, write_config: Callable[..., Path], tmp_path: Path, environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # XDG_CACHE_HOME below /proc/self/cwd is another folder in each process. So the hosts do not
    # share the driver's folder, and the second driver and the report have no copy of the first
    # driver's files.
    path = write_config(OF_TWO_HOSTS % (tmp_path / "met", tmp_path / "failed"))
    address, bucket = "s3://bucket/runs/x", Bucket()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def drive(host: str) -> subprocess.CompletedProcess[str]:
        words = ["--address", cluster.address, "--cpu-cells", 2, "--out", address]
        return sweep(
            "run",
            path,
            *words,
            env={**environment, **bucket.environment, "XDG_CACHE_HOME": f"/proc/self/cwd/{host}"},
        )

    with serve(bucket), cluster_of_hosts() as (cluster, join):
        raylets = {str(join(num_cpus=1).all_processes["raylet"][0].process.pid) for _ in range(2)}
        first = drive("first")
        assert (first.returncode, "measured 4 cells: 3 ok, 1 failed" in first.stdout) == (
            1,
            True,
        ), first.stdout + first.stderr
        before = dict(bucket.objects)
        second = drive("second")
        assert (second.returncode, "measured 1 cell: 1 ok" in second.stdout) == (0, True), (
            second.stdout + second.stderr
        )
        for name, value in {
            **bucket.environment,
            "XDG_CACHE_HOME": str(tmp_path / "third"),
        }.items():
            monkeypatch.setenv(name, value)
        reported = sweep_here("report", address)
        assert reported.exit_code == 0, reported.output
        attempts, samples, kernels = map(open_run(address).read, ("attempts", "samples", "kernels"))
    measured = set(attempts[["cell", "attempt", "status"]].itertuples(index=False, name=None))
    ok = {(cell, number) for cell, number, status in measured if status == "ok"}
    assert sorted((number, status) for _, number, status in measured) == [
        (1, "failed"),
        *[(1, "ok")] * 3,
        (2, "ok"),
    ]
    for rows in (samples, kernels):
        assert ok <= set(rows[["cell", "attempt"]].itertuples(index=False, name=None))
    of_rows = {
        name
        for name in before
        if name.startswith(("bucket/runs/x/attempts/", "bucket/runs/x/artifacts/"))
    }
    assert {name: bucket.objects[name] for name in of_rows} == {
        name: before[name] for name in of_rows
    }
    logs = ""
    for cell, number in ok:
        left = bucket.names(f"runs/x/artifacts/{cell}/{number}/")
        assert {ATTEMPT_FILE, LOG_FILE} < left
        assert [name for name in left if name.startswith("trace_")]
        logs += bucket.objects[f"bucket/runs/x/artifacts/{cell}/{number}/{LOG_FILE}"][0].decode()
    assert raylets <= set(logs.split())  # each host had cells
    assert list(Path(environment["TMPDIR"]).glob("sweep-*/artifacts/*"))  # in a folder of its own
    assert {"timings.md", "kernels.md"} <= bucket.names("runs/x/report/")
    assert not (tmp_path / "results").exists()


def started_cells(folder: Path) -> int:
    return len(list(folder.glob("artifacts/*/*/journal.jsonl")))


def test_a_killed_driver_loses_and_repeats_no_finished_cell(
    sweep_here: SweepHere,
    write_config: Callable[..., Path],
    tmp_path: Path,
    environment: dict[str, str],
) -> None:
    text = config_of("slowly", "fail").replace(
        "model_args:", "seed: [0, 1, 2, 3, 4]\n      model_args:"
    )
    text = text.replace("measured_steps: 2", "measured_steps: 8")  # a slow cell takes a second
    path, folder = write_config(text), tmp_path / "results" / "faults"
    chance, finished = random.Random(3), frozenset[tuple[str, int]]()
    for _ in range(2):
        driver = subprocess.Popen(
            sweep_command("run", path),
            cwd=tmp_path,
            env={**os.environ, **environment},
            stdout=subprocess.DEVNULL,
        )
        seen, deadline = started_cells(folder), time.monotonic() + 100
        while (
            started_cells(folder) == seen and time.monotonic() < deadline and driver.poll() is None
        ):
            time.sleep(0.05)
        assert started_cells(folder) > seen
        time.sleep(chance.uniform(0, 6))
        driver.kill()
        driver.wait()
        wait_until_gone(tmp_path)
        finished = measured_on_disk(folder, finished)
    done = sweep_here("run", path, "--scheduler", "serial")
    assert done.exit_code == 1, done.output
    assert set(statuses(folder).values()) == {"ok", "failed"}
    attempts = Run(folder).read("attempts")
    ok = attempts[attempts["status"] == "ok"]
    assert len(ok) == 7
    assert lost_and_repeated(folder, finished) == (0, 0)
    samples = Run(folder).read("samples")
    assert not samples.duplicated(
        ["cell", "attempt", "instrument", "mode", "phase", "metric", "step"]
    ).any()
    assert set(ok["cell"]) <= set(samples["cell"])
    recorded = set(zip(attempts["cell"], attempts["attempt"], strict=True))
    assert set(zip(samples["cell"], samples["attempt"], strict=True)) <= recorded


def wait_until_stuck(folder: Path, how: str) -> None:
    """Wait until the cell that never ends is in its forward pass."""
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        for attempt in folder.glob(f"artifacts/*/*/{ATTEMPT_FILE}"):
            if (
                how in attempt.read_text()
                and read_phase(attempt.with_name(PHASE_FILE)) == "forward"
            ):
                return
        time.sleep(0.1)
    raise AssertionError(f"{how} has not begun")


def listens_beyond_this_machine(tmp_path: Path) -> list[str]:
    """Return the sockets that other machines could connect to."""
    families = asked_of_each(tmp_path, lambda process: [process, *process.children(recursive=True)])
    ours = {process.pid for family in families for process in family}
    listening = [
        one
        for one in psutil.net_connections("inet")
        if one.status == psutil.CONN_LISTEN and one.pid in ours
    ]
    assert listening, "Ray listens to its own workers at least"
    return [
        f"{one.pid} {one.laddr}"
        for one in listening
        if not ip_address(one.laddr.ip.removeprefix("::ffff:")).is_loopback
    ]


@pytest.mark.parametrize(
    ("number", "times"), [(signal.SIGINT, 1), (signal.SIGINT, 2), (signal.SIGTERM, 1)]
)
def test_ctrl_c_ends_the_cells_and_keeps_the_finished_ones(
    sweep_here: SweepHere,
    write_config: Callable[..., Path],
    tmp_path: Path,
    environment: dict[str, str],
    number: int,
    times: int,
) -> None:
    folder = tmp_path / "results" / "faults"
    hang = f"{{how: spin_in_c, once: true, vocab_size: 100, mark: {tmp_path / 'first'}}}"
    path = write_config((CONFIG % hang).replace("timeout_s: 12", "timeout_s: 100"))
    driver = subprocess.Popen(
        sweep_command("run", path),
        cwd=tmp_path,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    wait_until_stuck(folder, "spin_in_c")
    assert not listens_beyond_this_machine(tmp_path)
    words = asked_of_each(tmp_path, lambda process: " ".join(process.cmdline()))
    assert all(
        "--disable-frontend" in word for word in words if "dashboard/dashboard.py" in word
    )  # Ray's usage statistics
    # Cells come from the fork server that was started before Ray.
    assert any(word.startswith("sweep: fork server") for word in words)
    modes = asked_of_each(
        tmp_path,
        lambda process: "raylet" in process.name() and process.environ().get("RAY_AUTH_MODE"),
    )
    assert set(modes) == {False, "token"}
    driver.send_signal(number)
    for _ in range(1, times):
        time.sleep(0.1)
        driver.send_signal(number)
    said, _ = driver.communicate(timeout=30)
    assert driver.returncode == 130
    assert (
        f"stopped by {signal.Signals(number).name} with 1 cell left. To continue: sweep run {path}"
        in said
    )
    assert statuses(folder) == {"good 0": "ok", "good 1": "ok"}
    wait_until_gone(tmp_path)
    untouched = rows_of_good_cells(folder)
    done = sweep_here("run", path, "--scheduler", "serial")
    assert "measured 1 cell: 1 ok" in done.output, done.output
    assert rows_of_good_cells(folder)[: len(untouched)] == untouched


def test_a_time_limit_has_its_exit_code_and_the_next_run_continues(
    sweep: Sweep,
    sweep_here: SweepHere,
    write_config: Callable[..., Path],
    tmp_path: Path,
    environment: dict[str, str],
) -> None:
    path = write_config(config_of("sleep").replace("timeout_s: 12", "timeout_s: 100"))
    began = time.monotonic()
    done = sweep("run", path, "--time-limit", "15s", env=environment)
    # The cell alone would take 100 s. test_pipeline.py checks the limit more exactly.
    assert time.monotonic() - began < 35
    assert done.returncode == 75, done.stdout + done.stderr
    assert re.search(r"out of time with \d cells? left.*\. To continue: sweep run", done.stdout)
    assert not (tmp_path / "cache").exists()
    wait_until_gone(tmp_path)
    done = sweep_here("run", path, "--where", "size=tiny", "--scheduler", "serial")
    assert done.exit_code == 0, done.output
    assert statuses(tmp_path / "results" / "faults") == {"good 0": "ok", "good 1": "ok"}


def test_a_second_driver_is_refused(
    sweep: Sweep,
    sweep_here: SweepHere,
    write_config: Callable[..., Path],
    tmp_path: Path,
    environment: dict[str, str],
) -> None:
    path, folder = write_config(config_of("sleep")), tmp_path / "results" / "faults"
    first = subprocess.Popen(
        sweep_command("run", path, "--scheduler", "serial"),
        cwd=tmp_path,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
    )
    wait_until_stuck(folder, "sleep")
    untouched = rows_of_good_cells(folder)
    assert len(untouched) == 2
    second = sweep("run", path, env=environment)
    assert second.returncode == 2
    assert f": process {first.pid} on " in second.stderr
    assert "Traceback" not in second.stderr
    first.terminate()
    assert first.wait(30) == 130
    done = sweep_here("run", path, "--scheduler", "serial", "--where", "size=tiny")
    assert done.exit_code == 0, done.output
    assert rows_of_good_cells(folder) == untouched


def kill_supervisor(tmp_path: Path) -> None:
    found = [
        process for process in psutil.process_iter() if process.name().startswith("ray::supervise")
    ]
    ours = [
        process
        for process in found
        if process.environ().get("TMPDIR") == str((tmp_path / "ray").resolve())
    ]
    assert len(ours) == 1
    ours[0].kill()


def test_a_killed_worker_and_a_lost_node_cost_one_cell_each(
    write_config: Callable[..., Path],
    tmp_path: Path,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    sweep_here: SweepHere,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    hang = "{how: sleep, once: true, vocab_size: 100, mark: %s}"
    hangs = ", ".join(hang % (tmp_path / mark) for mark in ("first", "second"))
    path = write_config(
        (CONFIG % f"{hangs}, {{how: well, vocab_size: 100}}").replace(
            "timeout_s: 12", "timeout_s: 100"
        )
    )
    folder = tmp_path / "results" / "faults"
    with cluster_of_hosts() as (cluster, join):
        node = join(num_cpus=1)
        with driver_on(cluster, path, tmp_path) as driver:
            wait_until_stuck(folder, str(tmp_path / "first"))
            kill_supervisor(tmp_path)
            wait_until_stuck(folder, str(tmp_path / "second"))
            join(num_cpus=1)
            cluster.remove_node(node, allow_graceful=False)
            assert driver.wait(60) == 1
        ends = sorted(zip(*read(folder, "started_at", "status", "evidence"), strict=True))
        assert [status for _, status, _ in ends] == ["ok", "ok", "lost", "lost", "ok"]
        assert all(
            re.search("its (supervisor|node) went away", str(evidence))
            for _, status, evidence in ends
            if status == "lost"
        )
        untouched = rows_of_good_cells(folder)
    done = sweep_here("run", path, "--scheduler", "serial")
    assert "measured 2 cells: 2 ok" in done.output, done.output
    assert rows_of_good_cells(folder)[: len(untouched)] == untouched


@contextmanager
def driver_on(cluster: Any, config: Path, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = sweep_command("run", config, "--address", cluster.address)
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL) as driver:
        try:
            yield driver
        finally:
            driver.kill()


def rows_of_good_cells(folder: Path) -> list[dict[str, object]]:
    """Return the rows of the attempts that succeeded, in the order of their start."""
    attempts = Run(folder).read("attempts")
    good = attempts[attempts["status"] == "ok"].sort_values("started_at")
    return good.to_dict("records")


def test_a_node_that_freezes_costs_one_cell_and_not_its_time_limit(
    write_config: Callable[..., Path],
    tmp_path: Path,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    sweep_here: SweepHere,
) -> None:
    # Like a node that the network is cut off from: no connection closes, and only the health
    # check of Ray notices it, which must not fail where this machine is only busy.
    asks = {"initial_delay_ms": 0, "period_ms": 1000, "timeout_ms": 4000, "failure_threshold": 4}
    for name, value in {
        **environment,
        **{f"RAY_health_check_{name}": str(value) for name, value in asks.items()},
    }.items():
        monkeypatch.setenv(name, value)
    hang = f"{{how: sleep, once: true, vocab_size: 100, mark: {tmp_path / 'first'}}}"
    path = write_config(
        (CONFIG % f"{hang}, {{how: well, vocab_size: 100}}").replace(
            "timeout_s: 12", "timeout_s: 600"
        )
    )
    folder = tmp_path / "results" / "faults"
    with cluster_of_hosts() as (cluster, join):
        node = join(num_cpus=1)
        with driver_on(cluster, path, tmp_path) as driver:
            wait_until_stuck(folder, str(tmp_path / "first"))
            (raylet,) = (psutil.Process(one.process.pid) for one in node.all_processes["raylet"])
            frozen = [raylet, *raylet.children(recursive=True)]
            try:
                for process in frozen:
                    process.suspend()
                join(num_cpus=1)
                # Ray took 30 to over 90 s on two cores with two other tests; the limit is 600 s.
                assert driver.wait(180) == 1
            finally:
                for process in frozen:
                    with suppress(psutil.NoSuchProcess):
                        process.resume()
        ends = sorted(zip(*read(folder, "started_at", "status", "evidence"), strict=True))
        assert [status for _, status, _ in ends] == ["ok", "ok", "lost", "ok"]
        assert "its node went away" in str(ends[2][2])
        untouched = rows_of_good_cells(folder)
    done = sweep_here("run", path, "--scheduler", "serial")
    assert "measured 1 cell: 1 ok" in done.output, done.output
    assert rows_of_good_cells(folder)[: len(untouched)] == untouched


def read(folder: Path, *columns: str) -> list[list[object]]:
    attempts = Run(folder).read("attempts")
    return [attempts[column].tolist() for column in columns]


def test_cells_run_on_nodes_with_their_kind_of_gpu(
    make_attempt: Callable[..., Attempt],
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    import ray

    def say_where(
        attempt: Attempt, cpus: int, gpus: object, mark: str
    ) -> Iterator[AttemptStarted | Outcome]:

        here = ray.get_runtime_context()
        import orchestrator

        program = str(orchestrator.__file__)
        facts = {
            "program": program,
            "kind": here.get_node_labels()["ray.io/accelerator-type"],
            "took": here.get_assigned_resources(),
        }
        yield AttemptStarted(attempt, "here", "0", 0.0)
        yield AttemptArchive(attempt, left)
        yield Outcome(attempt, Status.OK, "", "", {}, facts, (), 0.0, 0.0)

    (tmp_path / LOG_FILE).write_text("all is well")
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        tar.add(tmp_path / LOG_FILE, LOG_FILE)
    left = stream.getvalue()
    monkeypatch.setenv("TMPDIR", environment["TMPDIR"])
    monkeypatch.setattr("orchestrator.scheduling.ray_scheduler.supervise", say_where)
    cuda = [
        make_attempt(seed=seed, device="cuda", gpu_kind=kind)
        for kind in ("H100", "RTX 5090")
        for seed in range(2)
    ]

    def kinds_of(attempts: list[Attempt]) -> list[str]:
        return sorted(
            outcome.facts["kind"]
            for outcome in scheduler.run(ListQueue(attempts), lambda started: None)
        )

    with cluster_of_hosts() as (cluster, join):
        join(num_cpus=2, num_gpus=2, labels={"ray.io/accelerator-type": "H100"})
        join(num_cpus=1, num_gpus=1, labels={"ray.io/accelerator-type": "GeForce-RTX-5090"})
        scheduler = RayScheduler(print, cluster.address)
        assert [scheduler.slots("cuda", kind) for kind in (None, "h100", "RTX 5090", "A100")] == [
            3,
            2,
            1,
            0,
        ]
        assert kinds_of(cuda) == ["GeForce-RTX-5090", "GeForce-RTX-5090", "H100", "H100"]
        join(num_cpus=1, num_gpus=1, labels={"ray.io/accelerator-type": "A100"})
        assert kinds_of([make_attempt(device="cuda", gpu_kind="A100")]) == ["A100"]
        attempt = make_attempt(device="cuda", gpu_kind="H100", seed=9)
        (outcome,) = scheduler.run(ListQueue([attempt]), lambda started: None)
        assert outcome.status is Status.OK, outcome.evidence
        assert (attempt.path / LOG_FILE).read_text() == "all is well"
        assert "working_dir_files" in outcome.facts["program"]  # the copy that Ray shipped
        assert (outcome.facts["took"]["GPU"], outcome.facts["kind"]) == (1, "H100")


def test_a_supervisor_is_not_given_up_while_it_may_prepare_or_check_its_host(
    make_attempt: Callable[..., Attempt],
) -> None:
    given_up = SimpleNamespace(_give_up=lambda stream, started, reason: reason)
    attempt = make_attempt(1, settings={"timeout_s": 10.0})

    def after(seconds: float) -> object:
        return RayScheduler._give_up_hung(
            given_up, "it", AttemptStarted(attempt, "host", "", time.monotonic() - seconds)
        )  # type: ignore[arg-type]

    assert after(10 + PREPARATION_S + TIMEOUT_S) is None
    assert "its supervisor did not answer" in str(after(10 + 3 * (PREPARATION_S + TIMEOUT_S)))


@pytest.mark.parametrize(
    ("cluster", "hosts", "is_refused"),
    [(False, ["", ""], True), (False, ["", "here"], False), (True, ["", ""], False)],
)
def test_a_private_ray_that_begins_no_cell_ends_the_sweep(
    make_attempt: Callable[..., Attempt],
    monkeypatch: pytest.MonkeyPatch,
    cluster: bool,
    hosts: list[str],
    is_refused: bool,
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    session = SimpleNamespace(host=None if cluster else "this")
    notices: list[str] = []
    scheduler: Any = SimpleNamespace(
        _session=session, _idle_since=now, _has_notified=False, _notify=notices.append
    )
    running: Any = {
        number: AttemptStarted(make_attempt(number), host, "", now)
        for number, host in enumerate(hosts)
    }
    RayScheduler._require_start(scheduler, running)
    now += PREPARATION_S
    RayScheduler._require_start(scheduler, running)
    now += 2 * PREPARATION_S
    if is_refused:
        with pytest.raises(NoNodeLeft, match=r"^Ray has begun no cell for .*--scheduler serial"):
            RayScheduler._require_start(scheduler, running)
    else:
        RayScheduler._require_start(scheduler, running)
        # The wait begins when the last other cell has ended.
        running = {0: running[0]}
        now += PREPARATION_S
        RayScheduler._require_start(scheduler, running)
    # On a cluster, others may have what the cell waits for: one notice says so.
    assert notices == cluster * ["waiting for a host with enough GPUs or cores that nobody uses"]


def test_time_before_a_run_is_no_wait_for_its_first_cell(
    make_attempt: Callable[..., Attempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predictions may take longer than Ray may take to begin a cell."""
    scheduler = RayScheduler.__new__(RayScheduler)
    attempt, ended = make_attempt(1), lost_outcome(make_attempt(1), "", 0.0)
    running = {"it": AttemptStarted(attempt, "", "", 0.0)}
    vars(scheduler).update(
        _session=SimpleNamespace(host="here", require_alive=lambda: None),
        _placement=SimpleNamespace(note_end=lambda started: None),
        _health=SimpleNamespace(find_lost=lambda running, stuck: []),
        _submit_while_free=lambda queue, running_: running_.update(running),
        _next_events=lambda running: [("it", ended)],
        _cancel=lambda running: None,
    )
    for _ in range(2):
        now = time.monotonic() + 100 * PREPARATION_S
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        assert next(scheduler.run(ListQueue([]), lambda started: None)) is ended


def test_an_address_without_a_cluster_is_refused(
    sweep: Sweep, write_config: Callable[..., Path], environment: dict[str, str]
) -> None:
    done = sweep(
        "run", write_config(config_of("well")), "--address", "127.0.0.1:1", env=environment
    )
    assert done.returncode == 2
    assert "Is `ray start --head` running there?" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_ray_that_does_not_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ray raises Exception itself if its processes take too long.
    import ray

    def fail(*arguments: object, **options: object) -> None:
        raise Exception("The current node timed out during startup\nand more")

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(
        PlatformError,
        match=r"^Ray does not start: The current node timed out during startup\. `sweep run",
    ):
        RayScheduler(print)
