"""Fork servers: their children are as good as new processes, and nothing is lost when a server is."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.execution import fork_client, measurement
from orchestrator.execution.child_environment import child_environment
from orchestrator.execution.fork_client import ForkServers
from orchestrator.execution.measurement import FORK_SERVERS, Slot, execute, fork_purpose
from tasks.spec.attempt import LOG_FILE, Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.registry import make_cell
from tasks.spec.status import Status
from tests.conftest import ROOT

TESTS = str(ROOT / "tests" / "support")
ONE, TWO = Slot(1), Slot(2)
MakeAttempt = Callable[..., Attempt]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forking is for Linux")


@pytest.fixture
def own_servers() -> Iterator[None]:
    """Fork servers that no other test has used."""
    FORK_SERVERS.close()
    yield
    FORK_SERVERS.close()


def server_of(attempt: Attempt, slot: Slot | None = None) -> psutil.Process:
    process = measurement.fork_server(slot.place(attempt) if slot else attempt)._process
    assert process is not None
    return psutil.Process(process.pid)


def misbehaving(make_attempt: MakeAttempt, number: int, how: str, **settings: object) -> Attempt:
    own = {"size": None, "model": "misbehaving:Model", "model_args": {"how": how}}
    return make_attempt(number, settings={"import_paths": (TESTS,), **settings}, **own)


@pytest.mark.process
def test_cells_come_from_one_server_each_in_a_process_of_its_own(make_attempt: MakeAttempt) -> None:
    attempts = [make_attempt(1), make_attempt(2, optimizer="foreach")]
    first, second = map(execute, attempts)
    server = server_of(attempts[0])
    assert server_of(attempts[1]) == server
    assert (first.status, second.status) == (Status.OK, Status.OK)
    assert first.facts["start_method"] == second.facts["start_method"] == "fork"
    assert len({first.facts["pid"], second.facts["pid"], server.pid}) == 3


@pytest.mark.process
def test_the_compiler_is_there_before_a_cell_that_compiles_begins_and_not_sooner(
    make_attempt: MakeAttempt, own_servers: None
) -> None:
    messages, servers = [], set()
    for number, how in enumerate(("eager", "blocks"), start=1):
        own = {"size": None, "model": "misbehaving:refuse", "compile": how}
        attempt = make_attempt(number, settings={"import_paths": (TESTS,)}, **own)
        messages.append(execute(attempt).evidence["message"])
        servers.add(server_of(attempt))
    assert messages == ["the compiler is not there", "the compiler is there"]
    assert len(servers) == 1


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
def test_the_server_has_one_thread_and_no_device(make_attempt: MakeAttempt) -> None:
    """A thread or a device context would be missing, or broken, in every child."""
    attempt = make_attempt()
    execute(attempt)
    # numpy's linear algebra keeps one, and restarts it after a fork
    assert server_of(attempt).num_threads() <= 2


@pytest.mark.process
def test_another_environment_has_another_server(make_attempt: MakeAttempt) -> None:
    """And it is set before torch is there: the config's own wins over what the slot gives."""
    first = make_attempt(1)
    execute(first)
    second = TWO.place(make_attempt(2, settings={"env": {"OMP_NUM_THREADS": "1"}}))
    assert execute(second).facts["threads"] == 1
    assert server_of(second) != server_of(first)


@pytest.mark.process
def test_a_variable_that_is_read_late_may_differ_between_children_of_one_server(
    make_attempt: MakeAttempt, tmp_path: Path
) -> None:
    servers = set()
    for number, folder in enumerate((tmp_path / "one", tmp_path / "two"), start=1):
        env = {"TORCHINDUCTOR_CACHE_DIR": str(folder)}
        attempt = misbehaving(make_attempt, number, "tell_its_cache", env=env)
        assert execute(attempt).status is Status.OK
        assert f"compiles into {folder}\n" in (attempt.path / LOG_FILE).read_text()
        servers.add(server_of(attempt))
    assert len(servers) == 1


@pytest.mark.parametrize(("asked", "forked"), [(None, True), ("fork", True), ("spawn", False)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_process_is_forked_unless_a_new_one_is_asked_for(
    make_attempt: MakeAttempt, device: str, asked: str | None, forked: bool
) -> None:
    attempt = make_attempt(device=device, settings={"start_method": asked})
    assert fork_purpose(attempt) == ("measure" if forked else None)


@pytest.mark.process
def test_where_forking_does_not_work_the_process_is_a_new_one(
    make_attempt: MakeAttempt, own_servers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = FORK_SERVERS.server
    monkeypatch.setattr(FORK_SERVERS, "server", lambda device, own: find("cuda:99", own))
    attempt = make_attempt()
    outcome = execute(attempt)
    assert (outcome.status, outcome.facts["start_method"]) == (Status.OK, "spawn")
    log = (attempt.path / LOG_FILE).read_text()
    assert "spawned, since the fork server cannot fork: a forked child ended with code 1" in log


@pytest.mark.process
def test_where_torch_cannot_be_imported_the_reason_is_in_the_log(
    make_attempt: MakeAttempt, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch_cpu.so is not there')")
    attempt = make_attempt(settings={"env": {"PYTHONPATH": str(tmp_path)}})
    outcome = execute(attempt)
    assert (outcome.status, outcome.stage) == (Status.CRASHED, "start")
    log = (attempt.path / LOG_FILE).read_text()
    assert "it cannot import what cells need: " in log
    assert "libtorch_cpu.so is not there" in log


@pytest.mark.process
def test_a_server_that_died_between_two_cells_is_replaced(make_attempt: MakeAttempt) -> None:
    first, second = make_attempt(1), make_attempt(2)
    execute(first)
    before = server_of(first)
    before.kill()
    psutil.wait_procs([before], 5)
    assert execute(second).facts["start_method"] == "fork"
    assert server_of(second) != before


class Running:
    """An attempt that runs in another thread until its minder or a rank is killed."""

    def __init__(self, attempt: Attempt, mark: Path) -> None:
        self.outcomes: list[Outcome] = []
        self._thread = threading.Thread(target=lambda: self.outcomes.append(execute(attempt)))
        self._thread.start()
        deadline = time.monotonic() + 100
        while not (mark.exists() and mark.read_text().endswith("\n")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        self.rank = psutil.Process(int(mark.read_text()))
        minder = self.rank.parent()
        assert minder is not None
        self.minder = minder

    def outcome(self) -> Outcome:
        self._thread.join(30)
        return self.outcomes[0]


@pytest.fixture
def running(make_attempt: MakeAttempt, tmp_path: Path) -> Callable[..., Running]:
    def start(**settings: object) -> Running:
        mark = tmp_path / "mark"
        args = {"how": "sleep", "mark": str(mark)}
        own = {"size": None, "model": "misbehaving:Model", "model_args": args}
        attempt = make_attempt(settings={"import_paths": (TESTS,), **settings}, **own)
        return Running(attempt, mark)

    return start


@pytest.mark.process
def test_a_server_that_dies_under_its_children_costs_nothing(
    running: Callable[..., Running], make_attempt: MakeAttempt
) -> None:
    """The minder lives on, and keeps the time limit."""
    attempt = running(timeout_s=6.0)
    server = attempt.minder.parent()
    assert server is not None
    server.kill()
    assert attempt.outcome().status is Status.TIMEOUT
    assert not psutil.wait_procs([attempt.rank, attempt.minder], 5)[1]
    assert execute(make_attempt(2)).status is Status.OK


@pytest.mark.process
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_minder_that_dies_costs_its_attempt_alone(
    running: Callable[..., Running], make_attempt: MakeAttempt, method: str
) -> None:
    attempt = running(start_method=method)
    attempt.minder.kill()
    assert attempt.outcome().status is Status.LOST
    assert "went away" in attempt.outcome().evidence["message"]
    assert not psutil.wait_procs([attempt.rank], 5)[1]
    assert execute(make_attempt(2)).status is Status.OK


@pytest.mark.process
def test_a_minder_that_is_stopped_is_killed_after_its_limits(
    running: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement, "_GRACE_S", 0.5)
    monkeypatch.setattr(measurement, "ORPHANS_S", 0.5)
    monkeypatch.setattr(measurement, "PREPARATION_S", 6.0)
    attempt = running(timeout_s=4.0)
    attempt.minder.suspend()
    assert attempt.outcome().status is Status.LOST
    assert not psutil.wait_procs([attempt.rank, attempt.minder], 5)[1]


@pytest.mark.process
def test_a_server_that_no_longer_answers_is_replaced(
    make_attempt: MakeAttempt, own_servers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_attempt(1)
    execute(first)
    stopped = server_of(first)
    monkeypatch.setattr(fork_client, "PREPARATION_S", 1.0)
    monkeypatch.setattr(measurement, "_SERVER_S", 1.0)
    stopped.suspend()
    outcome = execute(make_attempt(2))
    assert (outcome.status, "went away" in outcome.evidence["message"]) == (Status.LOST, True)
    assert not stopped.is_running()
    monkeypatch.undo()
    assert execute(make_attempt(3)).status is Status.OK


SHARE = """
import sys, time
from orchestrator.execution.fork_client import ForkServers
server = ForkServers(sys.argv[1]).server("cpu", {"OMP_NUM_THREADS": "1"})
print(repr(server.broken("measure")), server._process is None, flush=True)
time.sleep(60)
"""


@pytest.mark.process
def test_processes_of_a_sweep_share_a_server(make_attempt: MakeAttempt) -> None:
    """Whoever asks first starts it, and another one starts if that process dies."""
    session = f"test-{os.getpid()}"
    environment = {**os.environ, **child_environment(make_attempt())}

    def ask() -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-c", SHARE, session]
        asker = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert asker.stdout is not None
        return asker, asker.stdout.readline().strip()

    first, answer = ask()
    servers = psutil.Process(first.pid).children()
    assert (answer, len(servers)) == ("'' False", 1)
    second, answer = ask()
    assert (answer, psutil.Process(second.pid).children()) == ("'' True", [])
    first.kill()
    assert not psutil.wait_procs(servers, 5)[1]
    third, answer = ask()
    assert answer == "'' False"
    for asker in (first, second, third):
        asker.kill()
        asker.communicate()


@pytest.mark.process
def test_a_server_survives_callers_without_a_request(
    make_attempt: MakeAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = make_attempt(1)
    execute(attempt)
    before, address = server_of(attempt), measurement.fork_server(attempt).address
    for content in (b"", b"{", b"[]\n", b"null\n", b'{"measure": {"name": 1}}\n', b"\xff\n"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
            caller.connect(address)
            caller.sendall(content)
    assert execute(make_attempt(2)).status is Status.OK
    assert server_of(attempt) == before


@pytest.mark.process
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_server_does_not_answer_another_user(make_attempt: MakeAttempt) -> None:
    attempt = make_attempt(1)
    execute(attempt)
    address = measurement.fork_server(attempt).address
    code = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX);"
        f"s.connect({address!r}); s.sendall(b'{{\"probe\": {{}}}}\\n'); print(s.recv(10))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    is_refused = any(word in done.stderr for word in ("reset", "Broken pipe"))
    assert done.stdout == "b''\n" or is_refused


@pytest.mark.process
def test_requests_are_not_sent_to_another_users_server(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ForkServers().server("cpu", {})
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(server.address)
        other.listen()
        another = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: another)
        with pytest.raises(PermissionError, match="belongs to user"):
            server.ask("probe", {})


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_imports_does_not_outlive_its_driver(
    make_attempt: MakeAttempt, number: int
) -> None:
    code = (
        "import time; from orchestrator.execution.fork_client import ForkServers;"
        "ForkServers().server('cpu', {}).begin_import('compile'); time.sleep(60)"
    )
    environment = {**os.environ, **child_environment(make_attempt())}
    driver = subprocess.Popen([sys.executable, "-c", code], env=environment)
    deadline = time.monotonic() + 20
    while not (started := psutil.Process(driver.pid).children(recursive=True)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(driver.pid, number)
    driver.wait(5)
    assert not psutil.wait_procs(started, 5)[1]


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
def test_a_signal_while_a_server_is_closed_leaves_nothing_to_close_again(
    make_attempt: MakeAttempt, own_servers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor that is closed already may be another file's descriptor when the program exits."""
    server = measurement.fork_server(make_attempt(1))
    assert server.broken("measure") == ""
    assert server._process is not None
    ends = server._process.wait

    def interrupted(timeout: float | None = None) -> int:
        ends(10)
        raise KeyboardInterrupt

    monkeypatch.setattr(server._process, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        server.close()
    with open(os.devnull) as nothing:  # has the number of what was closed
        server.close()
        os.fstat(nothing.fileno())


def test_the_address_follows_from_session_device_and_variables() -> None:
    def address(session: str, device: str, own: Mapping[str, str]) -> str:
        return ForkServers(session).server(device, own).address

    first = address("s", "cpu", {"A": "1", "CUDA_VISIBLE_DEVICES": "0"})
    assert first == address("s", "cpu", {"CUDA_VISIBLE_DEVICES": "1", "A": "1"})
    others = [("t", "cpu", "1"), ("s", "cuda", "1"), ("s", "cpu", "2")]
    assert len({first, *(address(s, d, {"A": a}) for s, d, a in others)}) == 4
