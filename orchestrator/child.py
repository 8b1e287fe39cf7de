"""The process that measures a cell, as its supervisor sees it: forked from a prepared parent, or a fresh one."""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol

from orchestrator import nsys
from tasks.harness.parent import ENVIRONMENT, MESSAGE_BYTES, READ_LATE, Preparation, Request
from tasks.harness.records import ATTEMPT_FILE, JOURNAL_FILE, LOG_FILE, Attempt

PROGRAM = (sys.executable, "-P", "-m", "tasks")  # -P: not the `model.py` or `tasks.py` of the folder one is in

_PREPARATION_S = 300.0
_HEARD_BYTES = 4000  # of what a parent said that did not come to be ready
_ANSWER_S = 30.0  # to fork, or to say how a child ended that was killed: a parent in order needs milliseconds


def import_path() -> str:
    """PYTHONPATH for a process of ours: our packages first, wherever it is started."""
    packages = str(Path(__file__).resolve().parent.parent)
    return os.pathsep.join(filter(None, [packages, os.environ.get("PYTHONPATH")]))


@contextmanager
def lifeline() -> Iterator[int]:
    """A file descriptor for a process that leads a group of its own and is to end with the body, or with this process."""
    theirs, ours = os.pipe()
    try:
        yield theirs
    finally:
        os.close(theirs)
        os.close(ours)


class ParentLost(Exception):
    """The prepared parent went away and with it the word of how its child ended."""


class Child(Protocol):
    """A process that leads a group of its own."""

    @property
    def pid(self) -> int: ...

    def ended(self, within_s: float) -> bool:
        """Raises ParentLost."""
        ...

    def exit_code(self) -> int:
        """Of one that has ended, or was killed. Negative for a signal. Raises ParentLost."""
        ...


class FreshChild:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid

    def ended(self, within_s: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        return self._process.returncode is not None

    def exit_code(self) -> int:
        return self._process.wait()


class ForkedChild:
    def __init__(self, pid: int, parent: PreparedParent) -> None:
        self.pid = pid
        self._parent = parent
        self._code: int | None = None

    def ended(self, within_s: float) -> bool:
        with suppress(TimeoutError):
            self._hear(within_s)
        return self._code is not None

    def exit_code(self) -> int:
        try:
            return self._hear(_ANSWER_S)
        except TimeoutError as error:
            raise ParentLost("it does not answer") from error

    def _hear(self, timeout_s: float) -> int:
        if self._code is None:
            self._code = int(self._parent.hear(timeout_s)["code"])
        return self._code


class PreparedParent:
    """See tasks/harness/parent.py. broken: why it cannot be used, or empty."""

    def __init__(self, device: str, environment: Mapping[str, str], log: int) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        end_of_lifeline, self._lifeline = os.pipe()
        with theirs:
            self._process = subprocess.Popen(
                [*PROGRAM, "--serve", str(theirs.fileno()), "--device", device, "--lifeline", str(end_of_lifeline)],
                env={**environment, **ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno(), end_of_lifeline],
                start_new_session=True,
            )
        os.close(end_of_lifeline)
        self.broken = ""
        self._prepared: set[Preparation] = set()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def prepare(self, preparation: Preparation) -> None:
        """Has it import what such cells need, once."""
        if self.broken or preparation in self._prepared:
            return
        self._prepared.add(preparation)
        try:
            self._channel.send(preparation.to_message())
            self.broken = str(self.hear(_PREPARATION_S).get("broken", ""))
        except (ParentLost, OSError) as error:  # a timeout is one
            self.broken = f"it did not come to be ready: {error}"

    def fork(self, attempt: Attempt, environment: Mapping[str, str], log: int, lifeline: int) -> ForkedChild:
        variables = {name: environment[name] for name in READ_LATE if name in environment}
        attempt_file, journal_file = (str(attempt.path / name) for name in (ATTEMPT_FILE, JOURNAL_FILE))
        request = Request(attempt_file, journal_file, os.getcwd(), variables)
        try:
            socket.send_fds(self._channel, [request.to_message()], [log, lifeline])
            return ForkedChild(self.hear(_ANSWER_S)["pid"], self)
        except OSError as error:  # a timeout is one
            raise ParentLost(str(error)) from error

    def hear(self, timeout_s: float) -> dict[str, Any]:
        """Its next message. Raises TimeoutError or ParentLost."""
        self._channel.settimeout(timeout_s)
        try:
            message = self._channel.recv(MESSAGE_BYTES)
        except ConnectionError as error:
            raise ParentLost(str(error)) from error
        if not message:
            raise ParentLost("it has ended")
        said: dict[str, Any] = json.loads(message)
        return said

    def close(self) -> None:
        self._channel.close()
        os.close(self._lifeline)
        self._process.wait()


class Starter:
    """Starts children. Keeps the prepared parent of the last of them while the next need the same environment."""

    def __init__(self) -> None:
        self._parent: PreparedParent | None = None
        self._said: IO[bytes] | None = None  # by the parent
        self._prepared_for: tuple[Any, ...] = ()

    def prepare(self, attempt: Attempt, own: Mapping[str, str]) -> None:
        """Has the parent ready that the attempt will be forked from, if it will be: it takes as long as a fresh process.

        Nothing of the attempt's folder is used, so that this can be done before there is one.
        """
        if not _is_forked(attempt):
            return
        device = attempt.cell.params.device
        key = (device, *sorted((name, value) for name, value in own.items() if name not in READ_LATE))
        if self._parent is None or key != self._prepared_for or not (self._parent.is_alive or self._parent.broken):
            self.close()
            self._said = tempfile.TemporaryFile()  # noqa: SIM115  closed in `close`
            self._parent = PreparedParent(device, {**os.environ, **own}, self._said.fileno())
            self._prepared_for = key
        self._parent.prepare(Preparation(attempt.cell.params.compiled))

    def start(self, attempt: Attempt, own: Mapping[str, str], lifeline: int) -> Child:
        """own: the variables that the child has beyond this process's. lifeline: what it dies with. Raises ParentLost."""
        environment = {**os.environ, **own}
        with (attempt.path / LOG_FILE).open("ab") as log:
            parent = self._parent if _is_forked(attempt) else None
            if parent is not None and not parent.broken:
                return parent.fork(attempt, environment, log.fileno(), lifeline)
            if parent is not None:
                log.write(f"a fresh process, since the prepared parent cannot fork: {parent.broken}\n".encode() + self._heard())
                log.flush()
            return _start_fresh(attempt, environment, log.fileno(), lifeline)

    def _heard(self) -> bytes:
        if self._said is None:
            return b""
        self._said.seek(0)
        return self._said.read()[-_HEARD_BYTES:]

    def close(self) -> None:
        if self._parent is not None:
            self._parent.close()
        if self._said is not None:
            self._said.close()
        self._parent = self._said = None


STARTER = Starter()  # of this process: a supervisor measures one cell at a time
atexit.register(STARTER.close)


def _is_forked(attempt: Attempt) -> bool:
    return sys.platform.startswith("linux") and attempt.settings.start_method != "spawn" and not nsys.command(attempt)


def _start_fresh(attempt: Attempt, environment: Mapping[str, str], log: int, lifeline: int) -> FreshChild:
    command = [*nsys.command(attempt), *PROGRAM, str(attempt.path / ATTEMPT_FILE)]
    command += ["--journal", str(attempt.path / JOURNAL_FILE), "--lifeline", str(lifeline)]
    process = subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=[lifeline],
        start_new_session=True,
    )
    return FreshChild(process)
