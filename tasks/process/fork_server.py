"""The prepared parent: a process that has imported all a cell needs, touched no device, and forks a child for each.

Importing torch and what an optimizer draws in takes several times as long as measuring a small cell; the compiler takes as
long again, and is imported when the first cell that compiles is to come. A forked child has them at once, and is as much a
process of its own as a fresh one. What would spoil its children, it never does: call CUDA, run a backward pass, or compute on
several cores.

Over a socket of whole messages it answers each preparation with `{"ready": true}` or `{"broken": reason}`, and each request,
which comes with the file descriptors of a log and of a lifeline, with `{"pid": …}` and, when that child has ended,
`{"code": …}`.

The grandparent of a host is begun before it is known where cells will be measured, and imports the same. For each that connects
and hands it the file descriptors of a log and of a lifeline, it forks a prepared parent, and answers `{"pid": …}`.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NoReturn

from tasks.process.lifeline import die_with_parent
from tasks.process.subreaper import adopt_orphans, children, end_others

# Read when they are used, not when torch is imported: a parent's children may differ in them.
READ_LATE = ("CUDA_VISIBLE_DEVICES", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
# Without it, importing torch's compiler asks CUDA itself for its devices, and no forked child could use them any more.
ENVIRONMENT = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
MESSAGE_BYTES = 64 * 1024

_PROBE_TIMEOUT_S = 60.0
_PROBE_TICK_S = 0.02
_PROBE_SIZE = 512  # enough for torch to use several cores
_WRITTEN_BYTES = 1024**2


@dataclass(frozen=True)
class Preparation:
    """compiled: whether the cells to come compile."""

    compiled: bool

    def to_message(self) -> bytes:
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True)
class Request:
    """attempt, journal: files. variables: of READ_LATE, those that the child has."""

    attempt: str
    journal: str
    folder: str
    variables: Mapping[str, str]

    def to_message(self) -> bytes:
        return json.dumps(asdict(self)).encode()


Measure = Callable[[str, str], None]  # of an attempt's file, into a journal's


def beget(listener: socket.socket, device: str, preparation: Preparation, measure: Measure) -> None:
    """The grandparent: has all that is needed, and forks a prepared parent for each that connects."""
    import_everything(preparation.compiled)
    proven = {preparation} if _probe(device) is None else set()
    while True:
        channel, _ = listener.accept()
        with channel, suppress(OSError):  # of one that went away again
            _beget_for(channel, listener, partial(serve, channel, device, measure, proven))
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _beget_for(channel: socket.socket, listener: socket.socket, work: Callable[[], None]) -> None:
    passed = list(socket.recv_fds(channel, MESSAGE_BYTES, 2)[1])
    try:
        if len(passed) == 2:
            pid = os.fork()
            if pid == 0:
                listener.close()
                _leave_after(partial(_be_parent, work, *passed))
            _lead_group(pid)
            _say(channel, {"pid": pid})
    finally:
        for descriptor in passed:
            os.close(descriptor)


def _be_parent(work: Callable[[], None], log: int, lifeline: int) -> None:
    _lead_group(0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    die_with_parent(lifeline)
    work()


def serve(
    channel: socket.socket, device: str, measure: Measure, proven: Collection[Preparation] = ()
) -> None:
    """Does as it is asked, one thing after another, until the other end is closed. proven: after what preparations it is known
    that children can compute."""
    adopt_orphans()
    own = children()  # that ends us with our lifeline
    while True:
        message, passed, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 2)
        if not message:
            return
        asked = json.loads(message)
        if passed:
            _fork(channel, Request(**asked), measure, passed)
            end_others(own)
        else:
            _prepare(channel, device, Preparation(**asked), proven)


def _prepare(
    channel: socket.socket, device: str, preparation: Preparation, proven: Collection[Preparation]
) -> None:
    import_everything(preparation.compiled)
    reason = None if preparation in proven else _probe(device)
    _say(channel, {"broken": reason} if reason else {"ready": True})


def _fork(
    channel: socket.socket, request: Request, measure: Measure, passed: Sequence[int]
) -> None:
    pid = os.fork()
    if pid == 0:
        channel.close()
        _leave_after(partial(_run_child, request, measure, *passed))
    for descriptor in passed:
        os.close(descriptor)
    _lead_group(pid)
    _say(channel, {"pid": pid})
    _say(channel, {"code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])})


def import_everything(compiled: bool) -> None:
    """What a cell needs, so that those that are forked afterwards have it. compiled: what compiled cells need, too."""
    importlib.import_module("torch._dynamo")  # by which an optimizer is built
    importlib.import_module("torch.profiler")
    if compiled:
        importlib.import_module("tasks.harness.compilation").load_compiler()
    for name in ("model", "tasks"):
        for module in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    gc.collect()
    gc.freeze()  # a collection in a child would otherwise copy every page of these


def _probe(device: str) -> str | None:
    """Why a forked child cannot compute here, or None if it can."""
    pid = os.fork()
    if pid == 0:
        _lead_group(0)
        _leave_after(partial(compute, device))
    deadline = time.monotonic() + _PROBE_TIMEOUT_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return (
                None
                if code == 0
                else f"a forked child ended with code {code} at its first computation"
            )
        time.sleep(_PROBE_TICK_S)
    os.killpg(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # what hangs in a driver of devices does not even die
    return f"a forked child did not end its first computation in {_PROBE_TIMEOUT_S:g} s"


def compute(device: str) -> None:
    """Something small, there and back. Raises whatever is wrong with the device."""
    import torch

    weight = torch.ones(_PROBE_SIZE, _PROBE_SIZE, device=device, requires_grad=True)
    (weight @ weight).sum().backward()  # type: ignore[no-untyped-call]
    if weight.grad is None or weight.grad[0, 0].item() != 2 * _PROBE_SIZE:
        raise ArithmeticError("the gradient of a product of ones is wrong")


def write_into(folder: str) -> None:
    """As much as a small cell does, there and where temporary files are; nothing of it stays. Raises OSError."""
    os.makedirs(folder, exist_ok=True)
    for place in (folder, tempfile.gettempdir()):
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(bytes(_WRITTEN_BYTES))
            file.flush()
            os.fsync(file.fileno())


def _leave_after(work: Callable[[], None]) -> NoReturn:
    """In a forked child: whatever the work comes to, it does not return to what the parent was doing."""
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _run_child(request: Request, measure: Measure, log: int, lifeline: int) -> None:
    """With what a fresh process would have been given when it was started."""
    _lead_group(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.chdir(request.folder)
    for name in READ_LATE:
        os.environ.pop(name, None)
    os.environ.update(request.variables)
    die_with_parent(lifeline)
    measure(request.attempt, request.journal)


def _lead_group(pid: int) -> None:
    """Said by parent and child alike: whichever is first, the group is there before anybody is told of it."""
    with suppress(OSError):
        os.setpgid(pid, pid)


def _say(channel: socket.socket, message: Mapping[str, Any]) -> None:
    channel.send(json.dumps(message).encode())
