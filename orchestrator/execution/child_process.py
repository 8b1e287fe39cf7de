"""The process that measures a cell, as its supervisor sees it: forked from a prepared parent, or a fresh one."""

from __future__ import annotations

import atexit
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Protocol

from orchestrator.execution import measuring_process as program
from orchestrator.execution import nsys
from orchestrator.execution.fork_server import (
    ANSWER_S,
    ForkServer,
    ForkServerLost,
    connect_fork_server,
    fork_key,
)
from tasks.process.fork_server import Preparation
from tasks.process.subreaper import ORPHANS_S
from tasks.spec.attempt import ATTEMPT_FILE, JOURNAL_FILE, LOG_FILE, PREPARATION_S, Attempt

_GRACE_S = 5.0  # beyond what an adopter may take
_HEARD_BYTES = 4000  # of what a parent said that did not come to be ready


class Child(Protocol):
    """A process that leads a group of its own."""

    @property
    def pid(self) -> int: ...

    def ended(self, within_s: float) -> bool:
        """Raises ForkServerLost."""
        ...

    def exit_code(self) -> int:
        """Of one that has ended, or was killed. Negative for a signal. Raises ForkServerLost."""
        ...


class SpawnedChild:
    def __init__(self, adopter: subprocess.Popen[bytes], told: IO[bytes]) -> None:
        """told: by the adopter, see tasks/process/subreaper.py. One that says nothing stands for the child itself."""
        self._adopter, self._told = adopter, told
        begun, _, _ = select.select([told], [], [], PREPARATION_S)
        self.pid = int((begun and told.readline()) or adopter.pid)
        self._code: int | None = None

    def ended(self, within_s: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self._adopter.wait(within_s)
        return self._adopter.returncode is not None

    def exit_code(self) -> int:
        """The adopter's own where it was killed, or does not end."""
        if self._code is None:
            try:
                code = self._adopter.wait(ORPHANS_S + _GRACE_S)
            except subprocess.TimeoutExpired:
                self._adopter.kill()
                code = self._adopter.wait()
            with self._told:
                self._code = int(self._told.readline() or code)
        return self._code


class ForkedChild:
    def __init__(self, pid: int, parent: ForkServer) -> None:
        self.pid = pid
        self._parent = parent
        self._code: int | None = None

    def ended(self, within_s: float) -> bool:
        with suppress(TimeoutError):
            self._hear(within_s)
        return self._code is not None

    def exit_code(self) -> int:
        try:
            return self._hear(ANSWER_S)
        except TimeoutError as error:
            raise ForkServerLost("it does not answer") from error

    def _hear(self, timeout_s: float) -> int:
        if self._code is None:
            self._code = int(self._parent.hear(timeout_s)["code"])
        return self._code


class ChildStarter:
    """Starts children. Keeps the prepared parent of the last of them while the next need the same environment."""

    def __init__(self) -> None:
        self._parent: ForkServer | None = None
        self._said: IO[bytes] | None = None  # by the parent
        self._kin = ""

    def prepare(self, attempt: Attempt, own: Mapping[str, str]) -> None:
        """Has the parent ready that the attempt will be forked from, if it will be: it takes as long as a fresh process.

        Nothing of the attempt's folder is used, so that this can be done before there is one.
        """
        if not is_forked(attempt):
            return
        device = attempt.cell.params.device
        kin = fork_key(device, own)
        if (
            self._parent is None
            or kin != self._kin
            or not (self._parent.is_alive or self._parent.broken)
        ):
            self.close()
            self._said = tempfile.TemporaryFile()  # noqa: SIM115  closed in `close`
            self._parent = connect_fork_server(device, own, self._said.fileno())
            self._kin = kin
        self._parent.prepare(Preparation(attempt.cell.params.compiled))

    def start(self, attempt: Attempt, own: Mapping[str, str], lifeline: int) -> Child:
        """own: the variables that the child has beyond this process's. lifeline: what it dies with. Raises ForkServerLost."""
        environment = {**os.environ, **own}
        with (attempt.path / LOG_FILE).open("ab") as log:
            parent = self._parent if is_forked(attempt) else None
            if parent is not None and not parent.broken:
                return ForkedChild(
                    parent.fork(attempt, environment, log.fileno(), lifeline), parent
                )
            if parent is not None:
                log.write(
                    f"a fresh process, since the prepared parent cannot fork: {parent.broken}\n".encode()
                    + self._heard()
                )
                log.flush()
            return _start_fresh(attempt, environment, log.fileno(), lifeline)

    def _heard(self) -> bytes:
        if self._said is None:
            return b""
        self._said.seek(0)
        return self._said.read()[-_HEARD_BYTES:]

    def close(self) -> None:
        """Once, though a signal ends it before its end: it is called again when the program exits."""
        parent, said, self._parent, self._said = self._parent, self._said, None, None
        try:
            if parent is not None:
                parent.close()
        finally:
            if said is not None:
                said.close()


CHILD_STARTER = ChildStarter()  # of this process: a supervisor measures one cell at a time
atexit.register(CHILD_STARTER.close)


def is_forked(attempt: Attempt) -> bool:
    return (
        sys.platform.startswith("linux")
        and attempt.settings.start_method != "spawn"
        and not nsys.command(attempt)
    )


def _start_fresh(
    attempt: Attempt, environment: Mapping[str, str], log: int, lifeline: int
) -> SpawnedChild:
    words = [
        str(attempt.path / ATTEMPT_FILE),
        "--journal",
        str(attempt.path / JOURNAL_FILE),
        "--lifeline",
        str(lifeline),
    ]
    heard, told = os.pipe()
    try:
        before = [*program.ADOPTING, str(told), *nsys.command(attempt)]
        adopter = program.start(words, environment, log, [lifeline, told], before)
    except BaseException:
        os.close(heard)
        raise
    finally:
        os.close(told)
    try:
        return SpawnedChild(adopter, os.fdopen(heard, "rb"))
    except BaseException:
        os.killpg(adopter.pid, signal.SIGKILL)
        raise
