"""The fork server: a process that has imported everything a cell needs and forks a child per cell.

Importing torch and what an optimizer needs takes several times as long as measuring a small cell.
The compiler takes as long again; it is imported when the first cell that compiles is about to
start. A forked child has these modules immediately and is otherwise as separate as a new process.

The server answers over a socket that preserves message boundaries. A preparation is answered with
`{"ready": true}` or `{"broken": reason}`. A request for a child, which comes with the file
descriptors of a log and of a lifeline, is answered with `{"pid": …}` and, when the child has ended,
`{"code": …}`. A request for a probe is answered with what a forked child finds out about this host,
so that torch is not imported for it alone, or with `{"broken": reason}`.

The template of a host imports the same, and starts before it is known which slots will measure.
For each connection, with the file descriptors of a log and of a lifeline, it forks a fork server
and answers `{"pid": …}`.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import re
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import NoReturn

from tasks.process.cpu_affinity import reset_niceness
from tasks.process.lifeline import die_with_parent
from tasks.process.subreaper import become_subreaper, kill_orphans

# The server itself must not use CUDA, run a backward pass, or compute on several cores: neither
# CUDA's context nor the threads of autograd and of OpenMP survive a fork, and each child would hang
# or fail at its first use of them.

# Variables that torch reads when it needs them, not when it is imported: children may differ in
# them.
READ_LATE = ("CUDA_VISIBLE_DEVICES", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
# Without this variable, importing torch's compiler initialises CUDA to list its devices, and then
# no forked child could use CUDA.
ENVIRONMENT = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
MESSAGE_BYTES = 64 * 1024

# No cell predicts, and some modules that do import the compiler.
_IS_UNUSED = re.compile(r"^tasks\.prediction\.|__main__$")
_PROBE_TIMEOUT_S = 60.0
_PROBE_TICK_S = 0.02
_PROBE_SIZE = 512  # so large that torch uses several cores, and a broken thread pool shows
_WRITTEN_BYTES = 1024**2  # about what a small cell writes


@dataclass(frozen=True)
class ForkPreparation:
    """The message to import all that a fork server needs. compiled: also the compiler."""

    compiled: bool

    def to_message(self) -> bytes:
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True)
class ForkRequest:
    """The message to fork a child."""

    attempt: str  # file
    journal: str  # file
    folder: str  # the child's working directory
    variables: Mapping[str, str]  # values of READ_LATE; a variable without a value is unset

    def to_message(self) -> bytes:
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True)
class ProbeRequest:
    """The message to find out what this host can measure on."""

    probe_with: Mapping[str, str]  # values of READ_LATE; a variable without a value is unset

    def to_message(self) -> bytes:
        return json.dumps(asdict(self)).encode()


Measure = Callable[[str, str], None]  # takes the file of an attempt and that of its journal


def run_template(
    listener: socket.socket, device: str, preparation: ForkPreparation, measure: Measure
) -> None:
    """Import everything, then fork a fork server for each connection, until killed."""
    import_everything(preparation.compiled)
    proven = {preparation} if _probe(device) is None else set()
    while True:
        channel, _ = listener.accept()
        with channel, suppress(OSError):  # the other end may already have closed the connection
            serve = partial(run_fork_server, channel, device, measure, proven)
            _fork_server_for(channel, listener, serve)
        # Reap the fork servers that have ended, which otherwise stay as zombies.
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _fork_server_for(
    channel: socket.socket, listener: socket.socket, serve: Callable[[], None]
) -> None:
    descriptors = list(socket.recv_fds(channel, MESSAGE_BYTES, 2)[1])
    try:
        if len(descriptors) == 2:
            log, lifeline = descriptors
            pid = os.fork()
            if pid == 0:
                listener.close()
                _exit_after(partial(_become_fork_server, serve, log, lifeline))
            _lead_group(pid)
            _send(channel, {"pid": pid})
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _become_fork_server(serve: Callable[[], None], log: int, lifeline: int) -> None:
    _lead_group(0)
    _write_output_to(log)
    die_with_parent(lifeline)
    serve()


def run_fork_server(
    channel: socket.socket, device: str, measure: Measure, proven: Collection[ForkPreparation] = ()
) -> None:
    """Answer one message after another until the other end is closed.

    proven: preparations after which children are known to compute, so that no probe is needed.
    """
    become_subreaper()
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 2)
        if not message:
            return
        body = json.loads(message)
        if descriptors:
            _fork(channel, ForkRequest(**body), measure, descriptors)
            kill_orphans()
        elif "probe_with" in body:
            _probe_host(channel, ProbeRequest(**body))
        else:
            _prepare(channel, device, ForkPreparation(**body), proven)


def _prepare(
    channel: socket.socket,
    device: str,
    preparation: ForkPreparation,
    proven: Collection[ForkPreparation],
) -> None:
    import_everything(preparation.compiled)
    reason = None if preparation in proven else _probe(device)
    _send(channel, {"ready": True} if reason is None else {"broken": reason})


def _fork(
    channel: socket.socket, request: ForkRequest, measure: Measure, descriptors: Sequence[int]
) -> None:
    log, lifeline = descriptors
    pid = os.fork()
    if pid == 0:
        channel.close()
        _exit_after(partial(_run_child, request, measure, log, lifeline))
    for descriptor in descriptors:
        os.close(descriptor)
    _lead_group(pid)
    _send(channel, {"pid": pid})
    _send(channel, {"code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])})


def _probe_host(channel: socket.socket, request: ProbeRequest) -> None:
    # The child stays in this process's group: should it hang, both are killed together.
    pid = os.fork()
    if pid == 0:
        _exit_after(partial(_send_probe, channel, request))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code != 0:
        _send(channel, {"broken": f"a forked child ended with code {code} while it looked"})


def _send_probe(channel: socket.socket, request: ProbeRequest) -> None:
    from tasks.process.environment import probe

    _set_read_late(request.probe_with)
    reset_niceness()
    _send(channel, probe())


def _set_read_late(variables: Mapping[str, str]) -> None:
    for name in READ_LATE:
        os.environ.pop(name, None)
    os.environ.update(variables)


def import_everything(compiled: bool) -> None:
    """Import what a cell needs, and with `compiled` the compiler, for the children to inherit."""
    importlib.import_module("torch._dynamo")  # the first optimizer imports it
    importlib.import_module("torch.profiler")
    if compiled:
        importlib.import_module("tasks.harness.compilation").load_compiler()
    for name in ("model", "tasks"):
        for module in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
            if not _IS_UNUSED.search(module.name):
                importlib.import_module(module.name)
    # A collection in a child would write to every page with objects, which copies the page.
    gc.collect()
    gc.freeze()


def _probe(device: str) -> str | None:
    """Return the reason why a forked child cannot compute on this host, or None if it can."""
    pid = os.fork()
    if pid == 0:
        _lead_group(0)
        _exit_after(partial(check_device, device))
    deadline = time.monotonic() + _PROBE_TIMEOUT_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            if code == 0:
                return None
            return f"a forked child ended with code {code} at its first computation"
        time.sleep(_PROBE_TICK_S)
    os.killpg(pid, signal.SIGKILL)
    # Without waiting: a process that hangs in a driver does not even die of SIGKILL.
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    return f"a forked child did not end its first computation in {_PROBE_TIMEOUT_S:g} s"


def check_device(device: str) -> None:
    """Run a small forward and backward pass. Raise whatever is wrong with the device."""
    import torch

    weight = torch.ones(_PROBE_SIZE, _PROBE_SIZE, device=device, requires_grad=True)
    (weight @ weight).sum().backward()  # type: ignore[no-untyped-call]
    if weight.grad is None or weight.grad[0, 0].item() != 2 * _PROBE_SIZE:
        raise ArithmeticError("the gradient of a product of ones is wrong")


def check_writable(folder: str) -> None:
    """Raise OSError if a small cell could not write to this folder or the temporary one."""
    os.makedirs(folder, exist_ok=True)
    for written in (folder, tempfile.gettempdir()):
        with tempfile.TemporaryFile(dir=written) as file:
            file.write(bytes(_WRITTEN_BYTES))
            file.flush()
            os.fsync(file.fileno())  # a full disk may show only here


def _exit_after(work: Callable[[], None]) -> NoReturn:
    """Do a forked child's work and end it, so that it never returns into the parent's code."""
    # _exit, not exit: the handlers of atexit and the buffers of streams are the parent's.
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _run_child(request: ForkRequest, measure: Measure, log: int, lifeline: int) -> None:
    """Set up the state that a new process would have started with, then measure."""
    _lead_group(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    _write_output_to(log)
    os.chdir(request.folder)
    _set_read_late(request.variables)
    die_with_parent(lifeline)
    measure(request.attempt, request.journal)


def _write_output_to(log: int) -> None:
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _lead_group(pid: int) -> None:
    """Make a child the leader of its process group; 0 names this process."""
    # Parent and child both call this, so that the group exists whoever runs first.
    with suppress(OSError):
        os.setpgid(pid, pid)


def _send(channel: socket.socket, message: Mapping[str, object]) -> None:
    channel.send(json.dumps(message).encode())
