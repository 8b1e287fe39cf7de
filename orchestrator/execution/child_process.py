"""The measuring process as its supervisor sees it: forked by a fork server, or spawned.

A forked child starts within milliseconds, because the fork server has imported torch already. On an
H200 host a spawned process needed 10.9 to 11.9 s to its first optimizer step, a forked one 0.7 s.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import IO, Protocol

from orchestrator.execution import nsys
from orchestrator.execution.fork_client import (
    ANSWER_S,
    ForkServer,
    ForkServerLost,
    connect_fork_server,
    fork_key,
)
from orchestrator.execution.measuring_process import SUBREAPER, start_process
from tasks.process.fork_server import ForkPreparation
from tasks.process.subreaper import ORPHANS_S
from tasks.spec.attempt import ATTEMPT_FILE, JOURNAL_FILE, LOG_FILE, PREPARATION_S, Attempt

_GRACE_S = 5.0  # on top of ORPHANS_S, in which a subreaper kills orphans
_OUTPUT_BYTES = 4000  # how much of a fork server's output goes into the log of a cell


class Child(Protocol):
    """A measuring process. It leads a process group."""

    @property
    def pid(self) -> int: ...

    def ended(self, within_s: float) -> bool:
        """Wait for at most `within_s`. Return True if the process has ended.

        Raises ForkServerLost.
        """
        ...

    def exit_code(self) -> int:
        """Return the exit code of a process that ended or was killed; negative for a signal.

        Raises ForkServerLost.
        """
        ...


class SpawnedChild:
    """A new process, started by a subreaper that kills what the process leaves running.

    The subreaper reports the child's process id and exit code (tasks/process/subreaper.py).
    """

    def __init__(self, subreaper: subprocess.Popen[bytes], reports: IO[bytes]) -> None:
        self._subreaper, self._reports = subreaper, reports
        has_report, _, _ = select.select([reports], [], [], PREPARATION_S)
        # A subreaper that failed before it started the child reports nothing: its own id is used.
        report = reports.readline() if has_report else b""
        self.pid = int(report or subreaper.pid)
        self._lines_before_code = 0 if report else 1  # a process id that comes later
        self._code: int | None = None

    def ended(self, within_s: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self._subreaper.wait(within_s)
        return self._subreaper.returncode is not None

    def exit_code(self) -> int:
        if self._code is None:
            try:
                code = self._subreaper.wait(ORPHANS_S + _GRACE_S)
            except subprocess.TimeoutExpired:
                self._subreaper.kill()
                code = self._subreaper.wait()
            with self._reports:
                lines = self._reports.readlines()[self._lines_before_code :]
            # A subreaper that was killed has not reported the child's code: its own replaces it.
            self._code = int(lines[0] if lines else code)
        return self._code


class ForkedChild:
    """A child of a fork server. The server reports the child's exit code."""

    def __init__(self, pid: int, server: ForkServer) -> None:
        self.pid = pid
        self._server = server
        self._code: int | None = None

    def ended(self, within_s: float) -> bool:
        with suppress(TimeoutError):
            self._receive_code(within_s)
        return self._code is not None

    def exit_code(self) -> int:
        try:
            return self._receive_code(ANSWER_S)
        except TimeoutError as error:
            raise ForkServerLost("it does not answer") from error

    def _receive_code(self, timeout_s: float) -> int:
        if self._code is None:
            self._code = int(self._server.receive(timeout_s)["code"])
        return self._code


class ChildStarter:
    """Starts children. It keeps the fork server while the next cells need the same environment."""

    def __init__(self) -> None:
        self.server: ForkServer | None = None
        self._output: IO[bytes] | None = None  # of the fork server
        self._key = ""

    def prepare(self, attempt: Attempt, own: Mapping[str, str]) -> None:
        """Start the fork server that the attempt will be forked from, and wait until it is ready.

        This takes as long as a new process takes to import torch. The attempt's folder need not exist.

        Args:
            own: environment variables of the child that this process does not have.
        """
        self.begin_to_prepare(attempt, own)
        if self.server is not None and is_forked(attempt):
            self.server.wait_until_ready()

    def begin_to_prepare(self, attempt: Attempt, own: Mapping[str, str]) -> None:
        """Start the fork server, if another one is needed, without waiting for it."""
        if not is_forked(attempt):
            return
        device = attempt.cell.params.device
        key = fork_key(device, own)
        if self.server is None or key != self._key or self.server.has_died:
            self.close()
            # A file, since nobody reads a pipe while the server runs, and a full pipe blocks it.
            self._output = tempfile.TemporaryFile()  # noqa: SIM115  closed in `close`
            self.server = connect_fork_server(device, own, self._output.fileno())
            self._key = key
        self.server.begin_to_prepare(ForkPreparation(attempt.cell.params.compiled))

    def start(self, attempt: Attempt, own: Mapping[str, str], lifeline: int) -> Child:
        """Start the child of an attempt. Raises ForkServerLost.

        `prepare` or `begin_to_prepare` must have been called for the same `own`.

        Args:
            own: environment variables of the child that this process does not have.
            lifeline: one end of a pipe; the child dies when the other end is closed.
        """
        environment = {**os.environ, **own}
        with (attempt.path / LOG_FILE).open("ab") as log:
            server = self.server if is_forked(attempt) else None
            if server is not None and not server.broken:
                pid = server.fork(attempt, environment, log.fileno(), lifeline)
                return ForkedChild(pid, server)
            if server is not None:
                reason = f"spawned, since the fork server cannot fork: {server.broken}\n"
                log.write(reason.encode() + self._last_output())
                log.flush()
            return _spawn(attempt, environment, log.fileno(), lifeline)

    def _last_output(self) -> bytes:
        if self._output is None:
            return b""
        self._output.seek(0)
        return self._output.read()[-_OUTPUT_BYTES:]

    def close(self) -> None:
        """End the fork server."""
        # A signal may interrupt this method, and atexit calls it again. A file descriptor that is
        # closed twice may by then belong to another file, so both attributes are emptied first.
        server, output, self.server, self._output = self.server, self._output, None, None
        with output or nullcontext():
            if server is not None:
                server.close()


# One starter is enough for a process, because a supervisor measures one cell at a time.
CHILD_STARTER = ChildStarter()
atexit.register(CHILD_STARTER.close)


def is_forked(attempt: Attempt) -> bool:
    """Return True if the attempt runs in a forked child.

    Only Linux has the subreapers and sockets that this needs. nsys must start its process itself.
    """
    wants_spawn = attempt.settings.start_method == "spawn"
    return sys.platform.startswith("linux") and not wants_spawn and not nsys.command(attempt)


def _spawn(
    attempt: Attempt, environment: Mapping[str, str], log: int, lifeline: int
) -> SpawnedChild:
    attempt_file = str(attempt.path / ATTEMPT_FILE)
    journal_file = str(attempt.path / JOURNAL_FILE)
    words = [attempt_file, "--journal", journal_file, "--lifeline", str(lifeline)]
    reports, subreaper_end = os.pipe()
    try:
        prefix = [*SUBREAPER, str(subreaper_end), *nsys.command(attempt)]
        passed = [lifeline, subreaper_end]
        subreaper = start_process(words, environment, log, passed, prefix)
    except BaseException:
        os.close(reports)
        raise
    finally:
        os.close(subreaper_end)
    try:
        return SpawnedChild(subreaper, os.fdopen(reports, "rb"))
    except BaseException:
        os.killpg(subreaper.pid, signal.SIGKILL)
        raise
