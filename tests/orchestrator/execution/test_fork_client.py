"""The grandparent, begun before it is known where cells will be measured: what is forked from it is as good as any other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from orchestrator.execution.child_environment import child_environment
from orchestrator.execution.child_process import CHILD_STARTER
from orchestrator.execution.child_supervision import execute, start_fork_template
from orchestrator.execution.fork_client import ANSWER_S, FORK_TEMPLATE, ForkServerTemplate
from tasks.spec.attempt import LOG_FILE, Attempt
from tasks.spec.status import Status
from tests.conftest import ROOT
from tests.killing import left_after

TESTS = str(ROOT / "tests" / "support")
ON = {"OMP_NUM_THREADS": "1"}  # a place
MakeAttempt = Callable[..., Attempt]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forking is for Linux")


@pytest.fixture
def grandparent(
    make_attempt: MakeAttempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ForkServerTemplate]:
    CHILD_STARTER.close()
    found = start_fork_template(tmp_path, make_attempt(), ON, {"TMPDIR": str(tmp_path)})
    monkeypatch.setenv(FORK_TEMPLATE, found.variables[FORK_TEMPLATE])
    yield found
    CHILD_STARTER.close()
    found.close()
    assert left_after(tmp_path, 5) == []


def _grandparent_of(attempt: Attempt) -> int:
    """As the cell itself has it."""
    said = (attempt.path / LOG_FILE).read_text()
    return int(said.split("ancestors: ")[1].split()[1])


def telling(make_attempt: MakeAttempt, number: int, **settings: object) -> Attempt:
    own = {"size": None, "model": "misbehaving:Model", "model_args": {"how": "tell_its_ancestors"}}
    return make_attempt(number, settings={"import_paths": (TESTS,), **settings}, **own)


@pytest.mark.process
def test_cells_are_grandchildren_of_the_fork_template(
    grandparent: ForkServerTemplate, make_attempt: MakeAttempt
) -> None:
    """Asked for before it is ready, too: then it is waited for."""
    attempts = [telling(make_attempt, number) for number in (1, 2)]
    outcomes = [execute(attempt, ON) for attempt in attempts]
    assert [outcome.status for outcome in outcomes] == [Status.OK] * 2
    assert [outcome.facts["start_method"] for outcome in outcomes] == ["fork"] * 2
    assert [outcome.facts["threads"] for outcome in outcomes] == [1, 1]
    assert [_grandparent_of(attempt) for attempt in attempts] == [grandparent.pid] * 2


@pytest.mark.process
def test_cells_of_another_environment_do_not_use_the_fork_template(
    grandparent: ForkServerTemplate, make_attempt: MakeAttempt
) -> None:
    attempt = telling(make_attempt, 1, env={"OMP_NUM_THREADS": "2"})
    assert execute(attempt, ON).facts["threads"] == 2
    assert _grandparent_of(attempt) != grandparent.pid


@pytest.mark.process
def test_without_a_fork_template_a_process_starts_its_own_fork_server(
    grandparent: ForkServerTemplate, make_attempt: MakeAttempt
) -> None:
    """What it had forked before lives on."""
    assert execute(telling(make_attempt, 1), ON).status is Status.OK
    psutil.Process(grandparent.pid).kill()
    later = telling(make_attempt, 2)
    assert execute(later, ON).facts["start_method"] == "fork"
    assert CHILD_STARTER.server is not None
    assert CHILD_STARTER.server.is_alive
    CHILD_STARTER.close()
    last = telling(make_attempt, 3)
    assert execute(last, ON).facts["start_method"] == "fork"
    assert _grandparent_of(last) == os.getpid()


@pytest.mark.process
def test_the_fork_template_replaces_a_fork_server_that_dies(
    grandparent: ForkServerTemplate, make_attempt: MakeAttempt
) -> None:
    execute(telling(make_attempt, 1), ON)
    assert CHILD_STARTER.server is not None
    first = psutil.Process(CHILD_STARTER.server.pid)
    first.kill()
    psutil.wait_procs([first], 1)
    attempt = telling(make_attempt, 2)
    assert execute(attempt, ON).status is Status.OK
    assert CHILD_STARTER.server.pid != first.pid
    assert _grandparent_of(attempt) == grandparent.pid


@pytest.mark.process
def test_a_fork_template_survives_callers_that_disconnect_without_a_request(
    grandparent: ForkServerTemplate, make_attempt: MakeAttempt
) -> None:
    for _ in range(3):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
            caller.connect(grandparent.address)
    attempt = telling(make_attempt, 1)
    assert execute(attempt, ON).status is Status.OK
    assert _grandparent_of(attempt) == grandparent.pid


@pytest.mark.process
def test_a_fork_template_and_its_fork_servers_die_with_their_driver(
    make_attempt: MakeAttempt, tmp_path: Path
) -> None:
    """Nor does one of its parents that whose place it was of, killed alike; while they import, as everywhere."""
    code = (
        "import os, time; from pathlib import Path; from orchestrator.execution.fork_client import FORK_TEMPLATE, ForkServerTemplate, connect_fork_server;"
        f"found = ForkServerTemplate(Path({str(tmp_path)!r}), 'cpu', {{}}, False, {{}}); os.environ.update(found.variables);"
        "parent = connect_fork_server('cpu', {}, 2); print(found.pid, parent.pid, flush=True); time.sleep(60)"
    )
    environment = {**os.environ, **child_environment(make_attempt())}
    driver = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    with driver, driver.stdout:
        kin = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
        assert len(kin) == 2
        driver.kill()
    _, alive = psutil.wait_procs(kin, 5)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def _others_of_group(leader: int) -> list[psutil.Process]:
    """Return the orphans in the process group of a leader, such as its watcher."""
    found = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            is_orphan = process.pid != leader and process.ppid() != leader
            if is_orphan and os.getpgid(process.pid) == leader:
                found.append(process)
    return found


@pytest.mark.process
def test_a_template_ends_although_the_process_that_watches_its_lifeline_was_killed(
    tmp_path: Path,
) -> None:
    template = ForkServerTemplate(tmp_path, "cpu", {}, False, {})
    process, deadline = psutil.Process(template.pid), time.monotonic() + 30
    while not (watchers := _others_of_group(template.pid)) and time.monotonic() < deadline:
        time.sleep(0.01)
    watchers[0].kill()
    began = time.monotonic()
    template.close()
    assert time.monotonic() - began < ANSWER_S / 3
    assert not process.is_running()
