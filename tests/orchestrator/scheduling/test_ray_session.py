"""The folder for Ray's files: one for each driver, removed after its death."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.common.errors import PlatformError
from orchestrator.scheduling import ray_session
from tests.conftest import ROOT

DRIVER = """
import sys
from orchestrator.scheduling.ray_session import session_folder
folder, lock = session_folder()
print(folder, flush=True)
sys.stdin.read()
"""


@contextmanager
def driver(base: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", DRIVER]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(base)},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def base() -> Iterator[Path]:
    """Return a short path, because the path of a socket may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="s-", dir="/tmp") as folder:
        yield Path(folder)


def folder_of(process: subprocess.Popen[str]) -> Path:
    assert process.stdout is not None
    return Path(process.stdout.readline().strip())


@pytest.mark.parametrize("drivers", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_drivers_that_start_together_have_separate_folders_and_those_of_dead_drivers_are_removed(
    base: Path, drivers: int
) -> None:
    with ExitStack() as ended:
        begun = [ended.enter_context(driver(base)) for _ in range(drivers)]
        folders = {folder_of(process) for process in begun}
        assert folders == set(base.iterdir())
        assert len(folders) == drivers
        assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}
    with driver(base) as alone:
        assert [folder_of(alone)] == list(base.iterdir())


def test_a_driver_whose_folder_is_removed_before_it_is_locked_makes_another(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    flock, cleared = ray_session.fcntl.flock, threading.Event()

    def flock_late(file: int, how: int) -> None:
        if not cleared.is_set():
            cleared.set()
            with driver(base) as other:
                folder_of(other)
        flock(file, how)

    monkeypatch.setattr(ray_session.fcntl, "flock", flock_late)
    folder, lock = ray_session.session_folder()
    try:
        assert Path(folder) in base.iterdir()
        assert cleared.is_set()
    finally:
        os.close(lock)


def test_processes_are_killed_if_the_shutdown_of_ray_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_session, "_SHUTDOWN_S", 0.2)
    killed, order = threading.Event(), list[str]()

    def shutdown() -> None:
        order.append("returned" if killed.wait(30) else "hung")

    session = ray_session.RaySession.__new__(ray_session.RaySession)
    helpers = ExitStack()
    helpers.callback(killed.set)
    helpers.callback(order.append, "killed")
    vars(session).update(ray=SimpleNamespace(shutdown=shutdown), _helpers=helpers, _folder="")
    session.close()
    assert order == ["killed", "returned"]


def test_a_shutdown_that_ends_comes_before_the_helpers_end() -> None:
    order: list[str] = []
    session = ray_session.RaySession.__new__(ray_session.RaySession)
    helpers = ExitStack()
    helpers.callback(order.append, "killed")
    ray = SimpleNamespace(shutdown=lambda: order.append("returned"))
    vars(session).update(ray=ray, _helpers=helpers, _folder="")
    session.close()
    assert order == ["returned", "killed"]


@pytest.mark.parametrize("before", [None, 0o644])
def test_the_token_of_ray_is_readable_by_its_user_alone(
    before: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    token = tmp_path / ".ray" / "auth_token"
    if before is not None:
        token.parent.mkdir()
        token.write_text("of an earlier session")
        token.chmod(before)
    ray_session._keep_token_private()
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(token.read_text()) == (64 if before is None else len("of an earlier session"))


def test_a_small_limit_on_files_is_named_before_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of Ray would be killed by it, and the reason would be lost."""
    monkeypatch.setattr(ray_session.resource, "getrlimit", lambda _: (65_536, 65_536))
    with pytest.raises(PlatformError, match=r"65,536 bytes .*Raise it with `ulimit -f`"):
        ray_session._start_private_ray("unused", 0)


def test_warnings_end_no_process_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def init(*_: object, **__: object) -> SimpleNamespace:
        seen.append(os.environ.get("PYTHONWARNINGS"))
        return SimpleNamespace()

    monkeypatch.setenv("PYTHONWARNINGS", "error")
    monkeypatch.setattr(ray_session, "_init_ray", init)
    monkeypatch.setattr(ray_session, "_keep_token_private", lambda: None)
    _, watch = ray_session._start_private_ray("unused", 0)
    watch.stop()
    assert seen == [None]
    assert os.environ["PYTHONWARNINGS"] == "error"


def test_a_private_ray_starts_no_process_that_nothing_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    class Node:
        def start_monitor(self) -> str:
            return "started"

        def start_raylet(self) -> str:
            return "started"

    monkeypatch.setitem(sys.modules, "ray._private.node", SimpleNamespace(Node=Node))
    with ray_session._only_used_processes():
        assert (Node().start_monitor(), Node().start_raylet()) == (None, "started")
        assert not hasattr(Node, "start_log_monitor")
    assert Node().start_monitor() == "started"


@pytest.mark.parametrize("module", [None, SimpleNamespace()])
def test_a_ray_without_that_private_class_starts_all(
    monkeypatch: pytest.MonkeyPatch, module: object
) -> None:
    monkeypatch.setitem(sys.modules, "ray._private.node", module)
    with ray_session._only_used_processes():
        pass
