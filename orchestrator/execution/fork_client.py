"""Clients of the fork servers; tasks/process/fork_server.py has the servers themselves.

A server belongs to a host, a sweep and an environment: it has an address that follows from these
three, so that the driver and Ray's workers on a host use the same one, and whoever finds none starts it.
It ends with the process that started it.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any

from orchestrator.common.hashing import sha256
from orchestrator.execution.program import ProcessNotStarted, start_process
from tasks.process.fork_server import (
    ENVIRONMENT,
    MEASURING,
    PREDICTING,
    READ_LATE,
    require_own_user,
)
from tasks.spec.attempt import PREPARATION_S
from tasks.spec.axes import leave_out
from tasks.spec.messages import error_text

_END_S = 30.0  # a process that waits for a device driver cannot be killed until that returns
_OUTPUT_BYTES = 4000  # how much of a server's output explains why it cannot fork


class ForkServerLost(Exception):
    """The fork server, or what it has forked, disappeared."""


class Connection:
    """A request to a fork server, and its answers. What it forked ends when this is closed."""

    def __init__(self, address: str) -> None:
        """address: of the server's socket. Raises OSError if nobody listens."""
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._channel.connect(address)
            require_own_user(self._channel)
        except BaseException:
            self._channel.close()
            raise
        self._lines = self._channel.makefile("rb")

    def send(self, line: str) -> None:
        """Send a line. Raises OSError."""
        self._channel.sendall(f"{line}\n".encode())

    def receive_line(self, timeout_s: float) -> str:
        """Return the next answer. Raises TimeoutError or ForkServerLost."""
        self._channel.settimeout(timeout_s)
        try:
            line = self._lines.readline()
        except ConnectionError as error:
            raise ForkServerLost(error_text(error)) from error
        if not line.endswith(b"\n"):
            raise ForkServerLost("it has ended")
        return line.decode()

    def receive(self, timeout_s: float) -> Mapping[str, Any]:
        """Return the next answer. Raises TimeoutError, ForkServerLost or ProcessNotStarted."""
        answer: Mapping[str, Any] = json.loads(self.receive_line(timeout_s))
        if "errno" in answer:
            raise ProcessNotStarted(answer["errno"], answer["error"])
        return answer

    def close(self) -> None:
        self._lines.close()
        self._channel.close()


@dataclass(eq=False)
class ForkServer:
    """A fork server of this host, as one of its clients sees it.

    Args:
        address: the name of its socket. Abstract: it lies in no folder, and ends with the server.
        device: on which the children must be able to compute; empty for children that predict.
        own: variables of the children that this process does not have, or has with other values.
    """

    address: str
    device: str
    own: Mapping[str, str]
    _process: subprocess.Popen[bytes] | None = None  # None: another process started it
    _lifeline: int = -1
    _output: IO[bytes] | None = None
    _imports: dict[str, Connection] = field(default_factory=dict)  # not answered yet
    _starting: threading.Lock = field(default_factory=threading.Lock)
    _died: str = ""  # how it died while it imported, as another one would

    def begin_import(self, purpose: str) -> None:
        """Make the server import what children need for a purpose, without waiting for it.

        Raises OSError if no server can be started.
        """
        if purpose not in self._imports and not self._died:
            self._imports[purpose] = self.ask("import", {"purpose": purpose})

    def broken(self, purpose: str) -> str:
        """Wait for what is imported. Return why nothing can be forked, or an empty text.

        Raises OSError if no server can be started.
        """
        self.begin_import(purpose)
        waiting = self._imports.pop(purpose, None)
        if waiting is None:
            return self._died
        try:
            return str(waiting.receive(PREPARATION_S)["broken"])
        except (ForkServerLost, TimeoutError) as error:
            self._died = f"it did not become ready: {error_text(error)}"
            return self._died
        finally:
            waiting.close()

    def ask(self, kind: str, body: Mapping[str, object]) -> Connection:
        """Send a request; see tasks/process/fork_server.py. Raises OSError."""
        with self._starting:
            try:
                connection = Connection(self.address)
            except OSError:  # nobody listens
                self._start()
                connection = Connection(self.address)
        connection.send(json.dumps({kind: body}))
        return connection

    def _start(self) -> None:
        """Start a server. Raises ProcessNotStarted."""
        self.close()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with listener:
            try:
                listener.bind(self.address)
            except OSError:  # another process has started one at this moment
                return
            listener.listen(128)
            # A file, since nobody reads a pipe while the server runs, and a full pipe blocks it.
            self._output = tempfile.TemporaryFile()  # noqa: SIM115  closed in `close`
            # The server ends when the other end of this pipe is closed, by `close` or with us.
            theirs, self._lifeline = os.pipe()
            words = ["--fork-server", str(listener.fileno()), "--device", self.device]
            words += ["--lifeline", str(theirs)]
            variables = {**os.environ, **self.own, **ENVIRONMENT}
            passed = [listener.fileno(), theirs]
            try:
                self._process = start_process(words, variables, self._output.fileno(), passed)
            finally:
                os.close(theirs)

    def last_output(self) -> bytes:
        """Return the end of what a server printed that this process started."""
        if self._output is None:
            return b""
        self._output.seek(0)
        return self._output.read()[-_OUTPUT_BYTES:]

    def close(self) -> None:
        """End the server, if this process started it. The next request starts another one."""
        # A signal may interrupt this method, and atexit calls it again. A file descriptor that is
        # closed twice may by then belong to another file, so the attributes are emptied first.
        process, lifeline, output = self._process, self._lifeline, self._output
        self._process, self._lifeline, self._output = None, -1, None
        imports, self._imports = self._imports, {}
        for waiting in imports.values():
            waiting.close()
        if output is not None:
            output.close()
        if lifeline >= 0:
            os.close(lifeline)
        if process is not None:
            process.kill()  # it may not watch its lifeline yet
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)


@dataclass
class ForkServers:
    """The fork servers that this process uses for a sweep: one for each environment."""

    session: str = field(default_factory=partial(secrets.token_hex, 8))
    _servers: dict[str, ForkServer] = field(default_factory=dict)

    def server(self, device: str, own: Mapping[str, str]) -> ForkServer:
        """Return the server for this device and these variables. Its first request starts it."""
        key = [device, *sorted(leave_out(own, READ_LATE).items())]
        digest = sha256(json.dumps(key))[:16]
        kind = MEASURING if device else PREDICTING
        address = f"\0{kind}-{os.getuid()}-{self.session}-{digest}"
        return self._servers.setdefault(address, ForkServer(address, device, own))

    def close(self) -> None:
        """End the servers that this process started."""
        for server in self._servers.values():
            server.close()
        self._servers.clear()
