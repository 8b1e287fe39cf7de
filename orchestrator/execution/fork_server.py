"""The processes that cells are forked from, as those see them that have them: see tasks/process/fork_server.py for what they do.

Each place that measures has a prepared parent. A driver begins a grandparent on its own host before Ray is there, which imports
while Ray starts, once for all places. A place whose cells have the same environment has its parent from there, and starts one by
itself where there is none.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from orchestrator.execution import measuring_process as program
from tasks.process.fork_server import (
    ENVIRONMENT,
    MESSAGE_BYTES,
    READ_LATE,
    ForkRequest,
    Preparation,
)
from tasks.spec.attempt import ATTEMPT_FILE, JOURNAL_FILE, PREPARATION_S, Attempt

FORK_TEMPLATE = "SWEEP_FORK_TEMPLATE"  # where it listens, and for cells of what environment
ANSWER_S = 30.0  # to fork, or to say how a child ended that was killed: a parent in order needs milliseconds

_ADOPTION_S = (
    60.0  # after which a place is sooner ready by itself than by a grandparent that does not answer
)


class ForkServerLost(Exception):
    """The prepared parent went away and with it the word of how its child ended."""


class ForkServer:
    """broken: why it cannot be used, or empty."""

    def __init__(
        self,
        channel: socket.socket,
        lifeline: int,
        pid: int,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        """lifeline: our end of it. process: None where it is another's child."""
        self.pid = pid
        self.broken = ""
        self._channel, self._lifeline, self._process = channel, lifeline, process
        self._prepared: set[Preparation] = set()

    @property
    def is_alive(self) -> bool:
        self._channel.settimeout(None)
        try:
            return bool(self._channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def prepare(self, preparation: Preparation) -> None:
        """Has it import what such cells need, once."""
        if self.broken or preparation in self._prepared:
            return
        self._prepared.add(preparation)
        try:
            self._channel.send(preparation.to_message())
            self.broken = str(self.hear(PREPARATION_S).get("broken", ""))
        except (ForkServerLost, OSError) as error:  # a timeout is one
            self.broken = f"it did not come to be ready: {error}"

    def fork(
        self, attempt: Attempt, environment: Mapping[str, str], log: int, lifeline: int
    ) -> int:
        """The process number of a child, of which it says `code` when it has ended. Raises ForkServerLost."""
        variables = {name: environment[name] for name in READ_LATE if name in environment}
        attempt_file, journal_file = (
            str(attempt.path / name) for name in (ATTEMPT_FILE, JOURNAL_FILE)
        )
        request = ForkRequest(attempt_file, journal_file, os.getcwd(), variables)
        try:
            socket.send_fds(self._channel, [request.to_message()], [log, lifeline])
            return int(self.hear(ANSWER_S)["pid"])
        except OSError as error:  # a timeout is one
            raise ForkServerLost(str(error)) from error

    def hear(self, timeout_s: float) -> dict[str, Any]:
        """Its next message. Raises TimeoutError or ForkServerLost."""
        self._channel.settimeout(timeout_s)
        try:
            message = self._channel.recv(MESSAGE_BYTES)
        except ConnectionError as error:
            raise ForkServerLost(str(error)) from error
        if not message:
            raise ForkServerLost("it has ended")
        said: dict[str, Any] = json.loads(message)
        return said

    def close(self) -> None:
        self._channel.close()
        os.close(self._lifeline)
        if self._process is not None:
            self._process.wait()


def fork_key(device: str, own: Mapping[str, str]) -> str:
    """What cells must have in common to be forked from the same parent: device, and what of their environment is read early."""
    return json.dumps(
        [device, *sorted((name, value) for name, value in own.items() if name not in READ_LATE)]
    )


def connect_fork_server(device: str, own: Mapping[str, str], said: int) -> ForkServer:
    """A parent for cells of this device with these variables beyond ours. said: a file descriptor for what it prints."""
    address, kin = json.loads(os.environ.get(FORK_TEMPLATE, "[null, null]"))
    if kin == fork_key(device, own):
        try:
            return _adopt(address, said)
        except ForkServerLost:
            del os.environ[FORK_TEMPLATE]  # not to be waited for again
    return start_parent(device, {**os.environ, **own}, said)


def start_parent(device: str, environment: Mapping[str, str], said: int) -> ForkServer:
    """A fresh process that becomes one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        words = ["--fork-server", str(theirs.fileno()), "--device", device]
        process, lifeline = program.start_bound(
            words, {**environment, **ENVIRONMENT}, said, [theirs.fileno()]
        )
    return ForkServer(ours, lifeline, process.pid, process)


def _adopt(address: str, said: int) -> ForkServer:
    """One that the grandparent there forks, as soon as it is ready. Raises ForkServerLost."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end_of_lifeline, lifeline = os.pipe()
    parent = ForkServer(channel, lifeline, 0)
    try:
        channel.connect(address)
        socket.send_fds(channel, [b"{}"], [said, end_of_lifeline])
        parent.pid = int(parent.hear(_ADOPTION_S)["pid"])
        return parent
    except (ForkServerLost, OSError) as error:  # a timeout is one
        parent.close()
        raise ForkServerLost(str(error)) from error
    finally:
        os.close(end_of_lifeline)


class ForkServerTemplate:
    """Of the places of this host. Lives until it is closed, or its driver ends; those that it has forked live on without it."""

    def __init__(
        self,
        folder: Path,
        device: str,
        own: Mapping[str, str],
        compiled: bool,
        mark: Mapping[str, str],
    ) -> None:
        """folder: a short path that nobody else can enter. own: variables of the cells beyond this process's; mark: its own."""
        self.address = str(folder / "parents")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [
            "--template",
            str(listener.fileno()),
            "--device",
            device,
            *(["--compiled"] if compiled else []),
        ]
        environment = {**os.environ, **own, **ENVIRONMENT, **mark}
        with listener, open(os.devnull, "wb") as nothing:
            listener.bind(self.address)
            listener.listen()
            self._process, self._lifeline = program.start_bound(
                words, environment, nothing.fileno(), [listener.fileno()]
            )
        self.pid = self._process.pid
        self.variables = {FORK_TEMPLATE: json.dumps([self.address, fork_key(device, own)])}

    def close(self) -> None:
        os.close(self._lifeline)
        with suppress(subprocess.TimeoutExpired):  # a driver of devices may hold what was killed
            self._process.wait(ANSWER_S)
