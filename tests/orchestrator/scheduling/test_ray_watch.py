"""The death of one of Ray's own processes. Copies of `sleep` stand for them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from orchestrator.common.errors import EXIT_USER, NoNodeLeft
from orchestrator.scheduling.ray_watch import RayWatch

pytestmark = pytest.mark.process

LIMIT_S = 5.0
# A driver that is in a call which does not return, while its gcs_server dies.
BLOCKED = """
import subprocess, sys, threading
from orchestrator.scheduling.ray_watch import RayWatch
watch = RayWatch()
child = subprocess.Popen([sys.argv[1], "1.5"])
threading.Event().wait(60)
"""

Start = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a child with the name of a process of Ray's."""
    with ExitStack() as ended:

        def start_child(name: str) -> subprocess.Popen[bytes]:
            child = subprocess.Popen([named_sleep(tmp_path, name), "60"])
            ended.enter_context(child)
            ended.callback(child.kill)
            return child

        yield start_child


def named_sleep(folder: Path, name: str) -> str:
    return str(shutil.copy(shutil.which("sleep") or "", folder / name))


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_the_death_of_a_process_ends_the_sweep_with_its_name(start: Start, name: str) -> None:
    children = {each: start(each) for each in ("gcs_server", "raylet")}
    watch = RayWatch()
    try:
        time.sleep(1.0)
        watch.require_alive()
        children[name].kill()
        deadline = time.monotonic() + LIMIT_S
        while not watch.died and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        watch.stop()
    with pytest.raises(NoNodeLeft, match=f"Ray's {name} on this machine has died. Run again"):
        watch.require_alive()


def test_processes_that_are_ended_on_purpose_are_no_failure(start: Start) -> None:
    child = start("gcs_server")
    watch = RayWatch()
    time.sleep(0.5)
    watch.stop()
    child.kill()
    child.wait()
    time.sleep(0.5)
    watch.require_alive()


def test_a_driver_that_waits_for_the_dead_process_ends_with_one_line(tmp_path: Path) -> None:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, named_sleep(tmp_path, "gcs_server")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == EXIT_USER, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("sweep: Ray's gcs_server on this machine has died. Run again")
    assert time.monotonic() - began < 40
