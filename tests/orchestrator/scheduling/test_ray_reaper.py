"""Processes of a Ray session after its driver was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from orchestrator.common.errors import EXIT_INTERRUPTED, EXIT_USER
from orchestrator.scheduling.ray_reaper import MARK, RAY_FOLDER, find_processes, reap
from tests.conftest import sweep_command
from tests.killing import begun, own_temporary_folder, processes_of

LIMIT_S = 5.0
CONFIG = """
name: reaped
limits: {timeout_s: 100}
grids:
  - task: accumulation
    fixed: {device: cpu, count: 500000}
    axes: {seed: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]}
"""
# Prints the id of its child, which has neither the environment nor the files of its parent.
PARENT = """
import subprocess, sys, time
words = [sys.executable, "-c", "import time; time.sleep(100)"]
print(subprocess.Popen(words, env={}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL).pid, flush=True)
time.sleep(100)
"""


@pytest.fixture
def session(tmp_path: Path) -> str:
    """Return the folder of a session with one log file of Ray's."""
    logs = tmp_path / "session" / RAY_FOLDER / "logs"
    logs.mkdir(parents=True)
    (logs / "agent.log").touch()
    return str(tmp_path / "session")


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[psutil.Process, psutil.Process]]]:
    """Return a function that starts a process with a child, as Ray starts agents and workers."""
    with ExitStack() as ended:

        def start_pair(
            log: Path | None = None, mode: str = "ab", env: dict[str, str] | None = None
        ) -> tuple[psutil.Process, psutil.Process]:
            output = log.open(mode) if log else None
            parent = subprocess.Popen(
                [sys.executable, "-c", PARENT], env=env or {}, stdout=subprocess.PIPE, stderr=output
            )
            ended.enter_context(parent)
            ended.callback(parent.kill)
            if output is not None:
                output.close()
            assert parent.stdout is not None
            child = psutil.Process(int(parent.stdout.readline()))
            ended.callback(end, child)
            return psutil.Process(parent.pid), child

        yield start_pair


def end(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()


def lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.process
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_processes_are_found_by_mark_open_files_and_parents(
    session: str, start: Callable[..., tuple[psutil.Process, psutil.Process]]
) -> None:
    """An agent of Ray may overwrite its environment, so that only its log file identifies it."""
    log = Path(session) / RAY_FOLDER / "logs" / "agent.log"
    lock = Path(session) / "lock"
    marked = start(env={MARK: session})
    writer = start(log)
    ours = {*marked, *writer}
    others = {
        *start(log, "rb"),  # somebody who reads a log of Ray's
        *start(lock),  # another driver that tries the lock
        *start(env={MARK: f"{session}-2"}),
    }
    assert find_processes(session) == ours
    reap(session)
    assert not any(map(lives, ours))
    assert all(map(lives, others))
    assert not Path(session).exists()


@pytest.mark.process
def test_a_process_that_was_seen_once_is_killed_with_its_children(
    session: str, start: Callable[..., tuple[psutil.Process, psutil.Process]]
) -> None:
    parent, child = start()
    other, _ = start()
    assert not find_processes(session)
    reap(session, [parent])
    assert not lives(parent)
    assert not lives(child)
    assert lives(other)


@pytest.mark.ray
@pytest.mark.parametrize("victim", ["driver", "gcs_server", "raylet", "a stopped raylet"])
def test_no_process_lives_five_seconds_after_its_sweep_was_killed(
    write_config: Callable[..., Path], tmp_path: Path, victim: str
) -> None:
    seen = set[psutil.Process]()
    run = tmp_path / "results" / "reaped"
    with own_temporary_folder(tmp_path) as environment:
        driver = subprocess.Popen(
            sweep_command("run", write_config(CONFIG)),
            cwd=tmp_path,
            env={**os.environ, **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        # Ids and start times are noted before the kill, because titles and environments change.
        while begun(run) < 2 and driver.poll() is None:
            seen.update(psutil.Process(driver.pid).children(recursive=True))
            time.sleep(0.1)
        seen.update(psutil.Process(driver.pid).children(recursive=True))
        living = {process.name(): process for process in seen if lives(process)}
        if victim == "a stopped raylet":
            living["raylet"].suspend()
            driver.send_signal(signal.SIGINT)
        else:
            living.get(victim, driver).kill()
        if victim in ("driver", "a stopped raylet"):
            driver.wait(60)
        killed_at = time.monotonic()
        _, errors = driver.communicate(timeout=30)
        while (
            (left := [one for one in seen if lives(one)])
            or processes_of(tmp_path)
            or list((tmp_path / "ray").glob("sweep-ray-*"))
        ):
            if time.monotonic() - killed_at > LIMIT_S:
                break
            time.sleep(0.05)
        assert not left
        assert not processes_of(tmp_path)
        assert not list((tmp_path / "ray").glob("sweep-ray-*"))
    if victim == "a stopped raylet":
        assert driver.returncode == EXIT_INTERRUPTED
        assert "Traceback" not in errors
    elif victim != "driver":
        assert driver.returncode == EXIT_USER
        *progress, message = errors.splitlines()
        assert message.startswith(f"sweep: Ray's {victim} on this machine has died. Run again")
        assert all(line.startswith("starting Ray: ") for line in progress)  # on a slow machine
    assert {"gcs_server", "raylet"} <= living.keys()
    assert any("Agent" in name for name in living)
