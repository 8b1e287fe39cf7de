"""Clients of the fork servers; tasks/process/fork_server.py has the servers themselves.

Each slot has a fork server. A driver also starts a template on its own host before Ray is up: it
imports torch while Ray starts, once for all slots, and forks a fork server for each slot whose
cells have the same environment. Any other slot starts a fork server by itself.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.execution.measuring_process import start_bound_process
from tasks.process.fork_server import (
    ENVIRONMENT,
    MESSAGE_BYTES,
    READ_LATE,
    ForkPreparation,
    ForkRequest,
    ProbeRequest,
)
from tasks.spec.attempt import ATTEMPT_FILE, JOURNAL_FILE, PREPARATION_S, Attempt
from tasks.spec.axes import leave_out, select
from tasks.spec.messages import error_text

# The variable with the template's socket and the environment that it serves.
FORK_TEMPLATE = "SWEEP_FORK_TEMPLATE"
# For a fork, and for the exit code of a child that was killed. A working server needs milliseconds.
ANSWER_S = 30.0
# Longer than that, and a slot is ready sooner with a fork server that it starts itself.
_TEMPLATE_S = 60.0


class ForkServerLost(Exception):
    """The fork server disappeared, and with it the exit code of its child."""


@dataclass(eq=False)
class ForkServer:
    """The connection to a fork server.

    Args:
        channel: our end of a socket to it.
        lifeline: our end of a pipe; the server ends when it is closed.
        process: the server, or None if it is a child of the template.
        broken: why it cannot be used, or empty.
    """

    channel: socket.socket
    lifeline: int
    pid: int
    process: subprocess.Popen[bytes] | None = None
    broken: str = ""
    _prepared: set[ForkPreparation] = field(default_factory=set)
    _unanswered: int = 0  # preparations

    @property
    def is_alive(self) -> bool:
        """True while the server's end of the socket is open."""
        self.channel.settimeout(None)
        try:
            return bool(self.channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    @property
    def has_died(self) -> bool:
        """True if a server that worked has disappeared."""
        # A broken one would break again, so it is not replaced.
        return not self.broken and not self.is_alive

    def begin_to_prepare(self, preparation: ForkPreparation) -> None:
        """Make the server import what such cells need, once, without waiting for it."""
        if self.broken or preparation in self._prepared:
            return
        self._prepared.add(preparation)
        try:
            self.channel.send(preparation.to_message())
            self._unanswered += 1
        except OSError as error:
            self._did_not_become_ready(error)

    def wait_until_ready(self) -> None:
        """Wait until the server has imported what the preparations need."""
        while self._unanswered and not self.broken:
            self._unanswered -= 1
            try:
                self.broken = str(self.receive(PREPARATION_S).get("broken", ""))
            except (ForkServerLost, OSError) as error:  # TimeoutError is an OSError
                self._did_not_become_ready(error)

    def _did_not_become_ready(self, error: Exception) -> None:
        self.broken = f"it did not become ready: {error_text(error)}"

    def probe_host(self) -> Mapping[str, Any]:
        """Return what `python -m tasks --probe` prints. Raises ForkServerLost."""
        self.wait_until_ready()
        request = ProbeRequest(select(os.environ, READ_LATE))
        try:
            self.channel.send(request.to_message())
            answer = self.receive(PREPARATION_S)
        except OSError as error:  # TimeoutError is an OSError
            raise ForkServerLost(error_text(error)) from error
        if reason := self.broken or answer.get("broken"):
            raise ForkServerLost(str(reason))
        return answer

    def fork(
        self, attempt: Attempt, environment: Mapping[str, str], log: int, lifeline: int
    ) -> int:
        """Fork a child and return its process id. Raises ForkServerLost.

        The next message is the child's exit code, once it has ended.
        """
        request = ForkRequest(
            attempt=str(attempt.path / ATTEMPT_FILE),
            journal=str(attempt.path / JOURNAL_FILE),
            folder=os.getcwd(),
            variables=select(environment, READ_LATE),
        )
        try:
            socket.send_fds(self.channel, [request.to_message()], [log, lifeline])
            return int(self.receive(ANSWER_S)["pid"])
        except OSError as error:  # TimeoutError is an OSError
            raise ForkServerLost(error_text(error)) from error

    def receive(self, timeout_s: float) -> Mapping[str, Any]:
        """Return the server's next message. Raises TimeoutError or ForkServerLost."""
        self.channel.settimeout(timeout_s)
        try:
            message = self.channel.recv(MESSAGE_BYTES)
        except ConnectionError as error:
            raise ForkServerLost(error_text(error)) from error
        if not message:
            raise ForkServerLost("it has ended")
        content: Mapping[str, Any] = json.loads(message)
        return content

    def close(self) -> None:
        """End the server. A child of the template is reaped by the template."""
        self.channel.close()
        os.close(self.lifeline)
        if self.process is not None:
            self.process.wait()


def fork_key(device: str, own: Mapping[str, str]) -> str:
    """Return what cells must have in common to be forked by the same server."""
    # These are the device and the variables that torch reads when it is imported.
    return json.dumps([device, *sorted(leave_out(own, READ_LATE).items())])


def connect_fork_server(device: str, own: Mapping[str, str], output: int) -> ForkServer:
    """Return a fork server for cells of this device with these variables besides ours.

    Args:
        output: a file descriptor for what the server prints.
    """
    address, key = json.loads(os.environ.get(FORK_TEMPLATE, "[null, null]"))
    if key == fork_key(device, own):
        try:
            return _fork_from_template(address, output)
        except ForkServerLost:
            # The next attempt of this slot must not wait for it again.
            del os.environ[FORK_TEMPLATE]
    return start_fork_server(device, {**os.environ, **own}, output)


def start_fork_server(device: str, environment: Mapping[str, str], output: int) -> ForkServer:
    """Start a new process that becomes a fork server."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        words = ["--fork-server", str(theirs.fileno()), "--device", device]
        variables = {**environment, **ENVIRONMENT}
        try:
            process, lifeline = start_bound_process(words, variables, output, [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
    return ForkServer(ours, lifeline, process.pid, process)


def _fork_from_template(address: str, output: int) -> ForkServer:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs, lifeline = os.pipe()
    server = ForkServer(channel, lifeline, 0)
    try:
        channel.connect(address)
        socket.send_fds(channel, [b"{}"], [output, theirs])
        server.pid = int(server.receive(_TEMPLATE_S)["pid"])
        return server
    except (ForkServerLost, OSError) as error:  # TimeoutError is an OSError
        server.close()
        raise ForkServerLost(error_text(error)) from error
    finally:
        os.close(theirs)


class ForkServerTemplate:
    """The process that fork servers of this host are forked from.

    It lives until it is closed or its driver ends. The servers live on without it.

    Args:
        folder: a short path that nobody else may enter; the template's socket lies there.
        own: variables of the cells besides those of this process.
        compiled: if cells will be compiled.
        tag: variables that identify the sweep the process belongs to.
    """

    def __init__(
        self,
        folder: Path,
        device: str,
        own: Mapping[str, str],
        compiled: bool,
        tag: Mapping[str, str],
    ) -> None:
        self.address = str(folder / "parents")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = ["--template", str(listener.fileno()), "--device", device]
        if compiled:
            words.append("--compiled")
        environment = {**os.environ, **own, **ENVIRONMENT, **tag}
        with listener, open(os.devnull, "wb") as nothing:
            listener.bind(self.address)
            listener.listen()
            self._process, self._lifeline = start_bound_process(
                words, environment, nothing.fileno(), [listener.fileno()]
            )
        self.pid = self._process.pid
        self.variables = {FORK_TEMPLATE: json.dumps([self.address, fork_key(device, own)])}

    def close(self) -> None:
        """End the template."""
        os.close(self._lifeline)
        # The process that ends it with its lifeline may itself have been killed.
        self._process.kill()
        # A process that waits for a device driver cannot be killed until the driver returns.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ANSWER_S)
