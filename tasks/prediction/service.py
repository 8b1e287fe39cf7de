"""The predictor: a process that answers requests for predictions, one line of JSON after another.

It is forked by a fork server that has imported torch, and answers the requests of one connection.
Its client opens another connection after a request with code of the user, so that a model that changes a
function of torch, or remembers a tensor, does so for no other cell.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import warnings
from contextlib import suppress
from pathlib import Path

from tasks.prediction.predictor import Predictor
from tasks.prediction.records import PredictionRequest
from tasks.process.cpu_affinity import prefer_for_oom_kill
from tasks.process.fork_server import MEASURING

_NICENESS = 19  # cells that are measured at the same time have priority
_SOCKETS = Path("/proc/net/unix")
_FRAME_WORDS = 2**16  # of 8 bytes


def answer_requests(connection: socket.socket) -> None:
    """Answer each line of the connection with one line, until it ends.

    The first line is the file for what this process and the user's models print.
    """
    prefer_for_oom_kill()
    warnings.simplefilter("ignore")
    # Collected after each cell instead, without examining torch's many small objects.
    gc.disable()
    predictor, process = Predictor(), os.getpid()
    with connection.makefile("r", encoding="utf-8") as lines:
        _print_to(lines.readline().rstrip("\n"))
        for line in lines:
            # At other times somebody may wait for this, next to other programs.
            if os.nice(0) < _NICENESS and may_be_measuring():
                yield_to_others()
            request = PredictionRequest.from_json(line)
            sys.path.extend(path for path in request.import_paths if path not in sys.path)
            answer = predictor.predict(request).to_json()
            # A user's model that forks may return here in the child, too, whose answer would be
            # taken for that of the next request.
            if os.getpid() != process:
                os._exit(0)
            connection.sendall(answer.encode() + b"\n")
            gc.collect()
            gc.freeze()


# CPython takes the memory of frames in chunks of 16 KiB. A loop whose calls reach the end of a chunk
# maps and unmaps one for each call: 45,000 times in a compiled cell, a sixth of its CPU time. For
# this frame of 0.5 MiB it maps 1 MiB, in whose rest the frames of all calls find room.
answer_requests.__code__ = answer_requests.__code__.replace(co_stacksize=_FRAME_WORDS)


def may_be_measuring() -> bool:
    """Return True if a sweep on this host has a fork server for its cells, or nobody knows."""
    with suppress(OSError):
        return MEASURING in _SOCKETS.read_text()
    return True


def yield_to_others() -> None:
    """Have the kernel run this process only on cores that nobody else wants."""
    os.nice(_NICENESS)
    # Where the kernel groups processes by session, a niceness holds within the session alone: next
    # to a busy process of another one, a process at 19 still got half of a core.
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_NICENESS))


def _print_to(file: str) -> None:
    with open(file, "ab") as output:
        for standard in (1, 2):
            os.dup2(output.fileno(), standard)
