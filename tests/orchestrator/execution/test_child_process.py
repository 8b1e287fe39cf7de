"""Children forked from a prepared parent: as good as fresh ones, and nothing is lost when the parent is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.execution import child_process as child
from orchestrator.execution.child_environment import child_environment
from orchestrator.execution.child_process import CHILD_STARTER, is_forked
from orchestrator.execution.child_supervision import execute
from tasks.process import subreaper as adoption
from tasks.spec.attempt import LOG_FILE, Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.registry import make_cell
from tasks.spec.status import Status
from tests.conftest import ROOT

TESTS = str(ROOT / "tests" / "support")
MakeAttempt = Callable[..., Attempt]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forking is for Linux")


@pytest.fixture
def fresh_start() -> Iterator[None]:
    """No parent that another test has prepared."""
    CHILD_STARTER.close()
    yield
    CHILD_STARTER.close()


def _parent() -> psutil.Process:
    assert CHILD_STARTER.server is not None
    return psutil.Process(CHILD_STARTER.server.pid)


@pytest.mark.process
def test_cells_come_from_one_parent_each_in_a_process_of_its_own(make_attempt: MakeAttempt) -> None:
    first = execute(make_attempt(1))
    parent = _parent()
    second = execute(make_attempt(2, optimizer="foreach"))
    assert _parent() == parent
    assert (first.status, second.status) == (Status.OK, Status.OK)
    assert first.facts["start_method"] == second.facts["start_method"] == "fork"
    assert len({first.facts["pid"], second.facts["pid"], parent.pid}) == 3


@pytest.mark.process
def test_the_compiler_is_there_before_a_cell_that_compiles_begins_and_not_sooner(
    make_attempt: MakeAttempt,
) -> None:
    CHILD_STARTER.close()
    said, parents = [], set()
    for number, how in enumerate(("eager", "blocks"), start=1):
        own = {"size": None, "model": "misbehaving:refuse", "compile": how}
        outcome = execute(make_attempt(number, settings={"import_paths": (TESTS,)}, **own))
        said.append(outcome.evidence["message"])
        parents.add(_parent())
    assert said == ["the compiler is not there", "the compiler is there"]
    assert len(parents) == 1


@pytest.mark.parametrize(
    ("task", "values", "compiled"),
    [
        ("train_step", {}, False),
        ("train_step", {"compile": "blocks"}, True),
        ("attention", {"attention": "flex"}, True),
        ("attention", {"compile": "model"}, True),
        ("matmul", {}, False),
    ],
)
def test_a_cell_compiles_if_its_compile_or_attention_axis_requires_it(
    task: str, values: dict[str, Any], compiled: bool
) -> None:
    size = {"size": "tiny"} if task == "train_step" else {}
    assert make_cell(task, {**size, **values}).params.compiled is compiled


@pytest.mark.process
def test_the_parent_has_one_thread_and_no_device(make_attempt: MakeAttempt) -> None:
    """A thread or a device context would be missing, or broken, in every child."""
    execute(make_attempt())
    assert (
        _parent().num_threads() <= 2
    )  # numpy's linear algebra keeps one, and restarts it after a fork


@pytest.mark.process
def test_another_environment_has_another_parent(make_attempt: MakeAttempt) -> None:
    """And it is set before torch is there: the config's own wins over what the place gives."""
    execute(make_attempt(1))
    before = _parent()
    outcome = execute(
        make_attempt(2, settings={"env": {"OMP_NUM_THREADS": "1"}}), {"OMP_NUM_THREADS": "2"}
    )
    assert outcome.facts["threads"] == 1
    assert _parent() != before
    assert not before.is_running()


@pytest.mark.process
def test_a_variable_that_is_read_late_may_differ_between_children_of_one_parent(
    make_attempt: MakeAttempt, tmp_path: Path
) -> None:
    own = {"size": None, "model": "misbehaving:Model", "model_args": {"how": "tell_its_cache"}}
    parents = set()
    for number, folder in enumerate((tmp_path / "one", tmp_path / "two"), start=1):
        settings = {"import_paths": (TESTS,), "env": {"TORCHINDUCTOR_CACHE_DIR": str(folder)}}
        attempt = make_attempt(number, settings=settings, **own)
        assert execute(attempt).status is Status.OK
        assert f"compiles into {folder}\n" in (attempt.path / LOG_FILE).read_text()
        parents.add(_parent())
    assert len(parents) == 1


@pytest.mark.parametrize(("asked", "forked"), [(None, True), ("fork", True), ("spawn", False)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_process_is_forked_unless_a_fresh_one_is_asked_for(
    make_attempt: MakeAttempt, device: str, asked: str | None, forked: bool
) -> None:
    assert is_forked(make_attempt(device=device, settings={"start_method": asked})) is forked


@pytest.mark.process
def test_where_forking_does_not_work_the_process_is_a_fresh_one(
    make_attempt: MakeAttempt, fresh_start: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = child.connect_fork_server
    monkeypatch.setattr(child, "connect_fork_server", lambda device, *rest: find("cuda:99", *rest))
    attempt = make_attempt()
    outcome = execute(attempt)
    assert (outcome.status, outcome.facts["start_method"]) == (Status.OK, "spawn")
    log = (attempt.path / LOG_FILE).read_text()
    assert "spawned, since the fork server cannot fork: a forked child ended with code 1" in log


@pytest.mark.process
def test_a_parent_that_died_between_two_cells_is_replaced(make_attempt: MakeAttempt) -> None:
    execute(make_attempt(1))
    _parent().kill()
    _parent().wait(5)
    assert execute(make_attempt(2)).facts["start_method"] == "fork"


@pytest.mark.process
def test_a_parent_that_dies_under_its_child_costs_that_attempt_alone(
    make_attempt: MakeAttempt,
) -> None:
    own = {"size": None, "model": "misbehaving:Model", "model_args": {"how": "sleep"}}
    outcomes: list[Outcome] = []
    attempt = make_attempt(settings={"import_paths": (TESTS,)}, **own)
    supervisor = threading.Thread(target=lambda: outcomes.append(execute(attempt)))
    supervisor.start()
    child = _wait_for_child_of_parent()
    _parent().kill()
    supervisor.join(10)
    assert outcomes[0].status is Status.LOST
    assert "went away" in outcomes[0].evidence["message"]
    psutil.wait_procs([child], 5)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert execute(make_attempt(2)).status is Status.OK


def has_a_line(mark: Path) -> bool:
    return mark.exists() and mark.read_text().endswith("\n")


@pytest.mark.process
def test_a_spawned_process_does_not_outlive_its_subreaper(
    make_attempt: MakeAttempt, tmp_path: Path
) -> None:
    own = {
        "size": None,
        "model": "misbehaving:Model",
        "model_args": {"how": "sleep", "mark": str(tmp_path / "mark")},
    }
    attempt, outcomes = (
        make_attempt(settings={"import_paths": (TESTS,), "start_method": "spawn"}, **own),
        list[Outcome](),
    )
    supervisor = threading.Thread(target=lambda: outcomes.append(execute(attempt)))
    supervisor.start()
    deadline = time.monotonic() + 100
    while not has_a_line(tmp_path / "mark"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    fresh = psutil.Process(int((tmp_path / "mark").read_text()))
    adopter = fresh.parent()
    assert adopter is not None
    assert adoption.__file__ in adopter.cmdline()
    adopter.kill()
    supervisor.join(10)
    assert (outcomes[0].status, outcomes[0].evidence["signal"]) == (Status.CRASHED, "SIGKILL")
    assert not psutil.wait_procs([fresh], 5)[1]


def _stopped(code: str) -> subprocess.Popen[bytes]:
    """A process that stands for a subreaper."""
    return subprocess.Popen(
        [sys.executable, "-c", f"import os, signal; {code}"], start_new_session=True
    )


def test_a_subreaper_that_is_stopped_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "ORPHANS_S", 0.1)
    monkeypatch.setattr(child, "_GRACE_S", 0.1)
    heard, told = os.pipe()
    os.write(told, b"123\n")
    fresh = child.SpawnedChild(
        _stopped("os.kill(os.getpid(), signal.SIGSTOP)"), os.fdopen(heard, "rb")
    )
    os.close(told)
    assert fresh.pid == 123
    assert not fresh.ended(0.1)
    assert fresh.exit_code() == fresh.exit_code() == -signal.SIGKILL


def test_a_subreaper_without_a_report_stands_for_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "PREPARATION_S", 0.1)
    heard, told = os.pipe()
    adopter = _stopped("signal.pause()")
    fresh = child.SpawnedChild(adopter, os.fdopen(heard, "rb"))
    os.close(told)
    assert fresh.pid == adopter.pid
    os.killpg(fresh.pid, signal.SIGKILL)
    assert fresh.exit_code() == -signal.SIGKILL


@pytest.mark.process
def test_a_parent_that_no_longer_answers_is_replaced(
    make_attempt: MakeAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.execution.child_process.ANSWER_S", 2.0)
    execute(make_attempt(1))
    stopped = _parent()
    stopped.suspend()
    outcome = execute(make_attempt(2))
    assert (outcome.status, "went away" in outcome.evidence["message"]) == (Status.LOST, True)
    assert not stopped.is_running()
    assert execute(make_attempt(3)).status is Status.OK


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_parent_that_is_being_prepared_does_not_outlive_its_supervisor(
    make_attempt: MakeAttempt, number: int
) -> None:
    attempt = make_attempt()
    attempt.path.mkdir(parents=True)
    code = (
        "import os, time; from orchestrator.execution.fork_client import start_fork_server; from tasks.process.fork_server import ForkPreparation;"
        "parent = start_fork_server('cpu', dict(os.environ), 2);"
        "parent.begin_to_prepare(ForkPreparation(compiled=True)); time.sleep(60)"
    )
    supervisor = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, **child_environment(attempt)}
    )
    deadline = time.monotonic() + 10
    while not (begun := psutil.Process(supervisor.pid).children(recursive=True)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(supervisor.pid, number)
    supervisor.wait(5)
    _, alive = psutil.wait_procs(begun, 5)
    assert not alive


def _wait_for_child_of_parent() -> psutil.Process:
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        if CHILD_STARTER.server is not None and not CHILD_STARTER.server.broken:
            children = [
                child for child in _parent().children() if child.pid == os.getpgid(child.pid)
            ]
            if children:
                time.sleep(1)
                return children[0]
        time.sleep(0.05)
    raise AssertionError("no child was forked")


PREDICT = """
import sys
from orchestrator.planning.prediction_requests import predict_memory
from tasks.spec.registry import make_cell
own = {"model": "misbehaving:Model", "model_args": {"how": "sleep", "mark": sys.argv[1]}, "device": "cuda"}
predict_memory([make_cell("train_step", own)], None, (sys.argv[2],))
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "script",
    ["from orchestrator.execution.host_probe import probe_here; probe_here()", PREDICT],
    ids=["probe", "prediction"],
)
def test_probing_and_predicting_processes_die_with_the_process_that_asked(
    script: str, tmp_path: Path
) -> None:
    """A prediction is of somebody's model, which may not come back."""
    mark = tmp_path / "mark"
    asker = subprocess.Popen([sys.executable, "-c", script, str(mark), TESTS])
    deadline, started = time.monotonic() + 100, list[psutil.Process]()
    while not (started if script != PREDICT else mark.exists()) and time.monotonic() < deadline:
        started = psutil.Process(asker.pid).children(recursive=True)
        time.sleep(0.02)
    started = psutil.Process(asker.pid).children(recursive=True)
    assert started
    asker.kill()
    asker.wait()
    assert not psutil.wait_procs(started, 5)[1]


@pytest.mark.process
def test_a_signal_while_the_parent_is_closed_leaves_nothing_to_close_again(
    make_attempt: MakeAttempt, fresh_start: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has closed already may be another file's descriptor when the program exits."""
    CHILD_STARTER.prepare(make_attempt(1), {})
    parent = CHILD_STARTER.server
    assert parent is not None
    assert parent.process is not None
    ends = parent.process.wait

    def interrupted(timeout: float | None = None) -> int:
        ends(10)
        raise KeyboardInterrupt

    monkeypatch.setattr(parent.process, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        CHILD_STARTER.close()
    with open(os.devnull) as nothing:  # has the number of what was closed
        CHILD_STARTER.close()
        os.fstat(nothing.fileno())


@pytest.mark.parametrize(("reported", "code"), [(b"", -9), (b"71\n", -9), (b"71\n3\n", 3)])
def test_a_process_id_that_is_reported_late_is_no_exit_code(
    reported: bytes, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "PREPARATION_S", 0.0)
    reports, end = os.pipe()
    with subprocess.Popen(["sleep", "60"]) as killed:
        late = child.SpawnedChild(killed, os.fdopen(reports, "rb"))
        assert late.pid == killed.pid
        os.write(end, reported)
        os.close(end)
        killed.kill()
        assert late.exit_code() == code
