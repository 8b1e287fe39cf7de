"""What an init does: it ends as its child does, hands on what it is sent, and leaves no zombie."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
BEGIN = (
    "import os, sys, time; from orchestrator.cli.container_init import become_init; become_init(); "
)


def begun(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BEGIN + code], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )


def test_it_ends_as_its_child_does() -> None:
    with begun("sys.exit(75)") as driver:
        assert driver.wait(20) == 75
    with begun("os.kill(os.getpid(), 9)") as driver:
        assert driver.wait(20) == 128 + 9


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_it_is_sent_its_child_is_sent(number: int) -> None:
    waits = "print(os.getpid(), flush=True); time.sleep(30)"
    code = f"import signal; signal.signal({int(number)}, lambda *more: sys.exit(7)); {waits}"
    with begun(code) as driver:
        assert driver.stdout is not None
        child = int(driver.stdout.readline())
        assert os.getpgid(child) == child
        driver.send_signal(number)
        assert driver.wait(20) == 7


@pytest.mark.skipif(
    shutil.which("unshare") is None, reason="needs a namespace of processes of its own"
)
def test_the_first_process_of_a_container_leaves_no_zombie(tmp_path: Path) -> None:
    new = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*new, "true"], capture_output=True, check=False).returncode:
        pytest.skip("may not make a namespace here")
    code = (
        "import os, subprocess, sys, time; from orchestrator.cli.container_init import go_on_behind_an_init; go_on_behind_an_init();"
        "[subprocess.run(['sh', '-c', 'sleep 0.1 &']) for _ in range(20)]; print(os.getpid(), flush=True); time.sleep(30)"
    )
    with subprocess.Popen(
        [*new, sys.executable, "-c", code], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        assert int(driver.stdout.readline()) > 1
        deadline = time.monotonic() + 10
        while zombies := _zombies_below(driver.pid):
            assert time.monotonic() < deadline, zombies
            time.sleep(0.1)
        for process in psutil.Process(driver.pid).children(recursive=True):
            with suppress(psutil.Error):  # with the first of them the namespace ends
                process.kill()


def _zombies_below(pid: int) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):
            found += [process] if process.status() == psutil.STATUS_ZOMBIE else []
    return found
