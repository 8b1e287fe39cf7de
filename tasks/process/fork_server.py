"""The fork server: a process that has imported everything a cell needs and forks what runs cells.

Importing torch and what an optimizer needs takes several times as long as measuring a small cell.
The compiler takes as long again; it is imported when the first cell that compiles is about to
start. A forked child has these modules immediately and is otherwise as separate as a new process.
On an H200 host a new process needed 10.9 to 11.9 s to its first optimizer step, a forked one 0.7 s.

There is one server for each host, sweep and environment, and only its own user may connect. Each
request is a connection with one line of JSON, `{KIND: {…}}`, and so are its answers. Connections that
measure and predict belong to a forked child from then on, which ends with them:

    import    import what a purpose needs: {"broken": REASON}, empty if forked children will work
    probe     what this host can measure on
    measure   a minder runs the attempt: {"minder": PID, "ranks": PIDS}, then its RankExits
    predict   a child answers one request after another: {"predictor": PID}, then a line for each
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import signal
import socket
import struct
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import NoReturn

from tasks.process.cpu_affinity import reset_niceness
from tasks.process.gc_pause import frozen_imports
from tasks.process.minder import (
    MindRequest,
    become_subreaper,
    die_with_parent_process,
    exit_after,
    kill_children,
    mind,
    send,
    set_title,
)
from tasks.spec.messages import error_text

# The server itself must not use CUDA, run a backward pass, or compute on several cores: neither
# CUDA's context nor the threads of autograd and of OpenMP survive a fork, and each child would hang
# or fail at its first use of them.

# Variables that torch reads when it needs them, not when it is imported: children may differ in
# them.
READ_LATE = ("CUDA_VISIBLE_DEVICES", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
# Without this variable, importing torch's compiler initialises CUDA to list its devices, and then
# no forked child could use CUDA.
ENVIRONMENT = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

# What children do: measure cells, measure cells that compile, predict cells, predict compiled cells.
MEASURE, COMPILE = "measure", "compile"
PREDICT, PREDICT_COMPILED = "predict", "predict compiled"
_PREDICTS = (PREDICT, PREDICT_COMPILED)

# The first part of a server's address: one whose children measure, and one whose children predict.
MEASURING, PREDICTING = "sweep-measure", "sweep-predict"

# No cell predicts, and some modules that do import the compiler.
_IS_UNUSED = re.compile(r"^tasks\.prediction\.|__main__$")
_CREDENTIALS = "3i"  # process, user, group
_REQUEST_S = 10.0  # for a client to send its line
_IDLE_S = 1.0  # between two looks for children that have ended
_PROBE_TIMEOUT_S = 60.0
_PROBE_TICK_S = 0.02
_PROBE_SIZE = 512  # so large that torch uses several cores, and a broken thread pool shows
_WRITTEN_BYTES = 1024**2  # about what a small cell writes


# Runs a rank: takes the file of an attempt, that of its journal, and the number of the rank.
Measure = Callable[[str, str, int], None]


def run_fork_server(listener: socket.socket, device: str, measure: Measure) -> NoReturn:
    """Answer requests until this process is killed."""
    become_subreaper()
    set_title("fork server")
    Server(listener, device, measure).run()


class Server:
    """A fork server. It answers one request at a time, and its children run at the same time.

    device: "cpu", "cuda" or "mps", on which children must be able to compute.
    """

    def __init__(self, listener: socket.socket, device: str, measure: Measure) -> None:
        self._listener, self._device, self._measure = listener, device, measure
        self._children: set[int] = set()
        self._broken: dict[str, str] = {}  # by purpose: why no child can be forked for it

    def run(self) -> NoReturn:
        while True:
            self._listener.settimeout(_IDLE_S)
            with suppress(OSError, ValueError):  # no request, or not a whole one
                connection, _ = self._listener.accept()
                with connection:
                    require_own_user(connection)
                    connection.settimeout(_REQUEST_S)
                    line = connection.makefile("rb").readline()
                    connection.settimeout(None)
                    request = json.loads(line)
                    if isinstance(request, dict):
                        self._answer(request, connection)
            self._reap()

    def _answer(self, request: Mapping[str, dict[str, object]], connection: socket.socket) -> None:
        if "import" in request:
            purpose = str(request["import"]["purpose"])
            try:
                if purpose not in self._broken:
                    self._broken[purpose] = self._import(purpose)
            except OSError as error:  # the probe could not be forked now
                _send_error(connection, error)
                return
            send(connection, {"broken": self._broken[purpose]})
        elif "probe" in request:
            self._fork(partial(_send_probe, connection, request["probe"]), connection)
        elif "measure" in request:
            self._fork(partial(self._mind, connection, request["measure"]), connection)
        elif "predict" in request:
            self._fork(partial(_answer_predictions, connection), connection)

    def _import(self, purpose: str) -> str:
        """Import what children need. Return why none can be forked, empty if they work."""
        try:
            with frozen_imports():
                import_for(purpose)
        except Exception as error:
            traceback.print_exc()
            return f"it cannot import what cells need: {error_text(error)}"
        return "" if purpose in _PREDICTS else self._probe()

    def _fork(self, work: Callable[[], None], connection: socket.socket) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            _send_error(connection, error)
            return
        if pid == 0:
            self._listener.close()
            exit_after(work)
        self._children.add(pid)

    def _mind(self, connection: socket.socket, body: Mapping[str, object]) -> None:
        request = MindRequest(**body)  # type: ignore[arg-type]

        def run(rank: int) -> None:
            _set_read_late(request.variables)
            self._measure(request.attempt, request.journal, rank)

        mind(request, run, connection)

    def _reap(self) -> None:
        """Forget the children that have ended, and kill what a killed minder has left running."""
        for pid in list(self._children):
            with suppress(ChildProcessError):
                if not os.waitpid(pid, os.WNOHANG)[0]:
                    continue
            self._children.remove(pid)
        kill_children(spared=self._children)

    def _probe(self) -> str:
        """Return the reason why a forked child cannot compute here, empty if it can."""
        pid = os.fork()
        if pid == 0:
            self._listener.close()  # or a client would connect to it when the server is gone
            os.setpgid(0, 0)
            exit_after(partial(check_device, self._device))
        deadline = time.monotonic() + _PROBE_TIMEOUT_S
        while time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                if code == 0:
                    return ""
                return f"a forked child ended with code {code} at its first computation"
            time.sleep(_PROBE_TICK_S)
        # Without waiting: a process that hangs in a driver does not even die of SIGKILL.
        os.kill(pid, signal.SIGKILL)
        self._children.add(pid)
        return f"a forked child did not end its first computation in {_PROBE_TIMEOUT_S:g} s"


def _send_error(connection: socket.socket, error: OSError) -> None:
    send(connection, {"errno": error.errno, "error": error.strerror})


def require_own_user(connection: socket.socket) -> None:
    """Raise PermissionError if another user is at the other end of a socket."""
    size = struct.calcsize(_CREDENTIALS)
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, uid, _ = struct.unpack(_CREDENTIALS, peer)
    if uid != os.getuid():
        raise PermissionError(f"the other end belongs to user {uid}")


def _send_probe(connection: socket.socket, variables: Mapping[str, object]) -> None:
    """Send what this host can measure on. Variables: values of READ_LATE."""
    from tasks.process.environment import probe

    _set_read_late({name: str(value) for name, value in variables.items()})
    reset_niceness()
    send(connection, probe())


def _answer_predictions(connection: socket.socket) -> None:
    os.setsid()
    die_with_parent_process()
    set_title("predictor")
    send(connection, {"predictor": os.getpid()})
    importlib.import_module("tasks.prediction.service").answer_requests(connection)


def _set_read_late(variables: Mapping[str, str]) -> None:
    """Set these variables; one without a value is unset."""
    for name in READ_LATE:
        os.environ.pop(name, None)
    os.environ.update(variables)


def import_for(purpose: str) -> None:
    """Import what children need for a purpose, for them to inherit."""
    if purpose in _PREDICTS:
        importlib.import_module("tasks.prediction.service")
        if purpose == PREDICT_COMPILED:
            importlib.import_module("tasks.prediction.compiled_calls")
    else:
        importlib.import_module("torch._dynamo")  # the first optimizer imports it
        importlib.import_module("torch.profiler")
        if purpose == COMPILE:
            importlib.import_module("tasks.harness.compilation").load_compiler()
        for name in ("model", "tasks"):
            for module in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
                if not _IS_UNUSED.search(module.name):
                    importlib.import_module(module.name)


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
