"""The predictor: a process that answers requests for predictions, one line of JSON after another.

It is forked by a fork server that has imported torch, and answers the requests of one connection.
Its client opens another connection for other code of the user, so that a model that changes a function of
torch changes it for no other model.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import warnings

from tasks.prediction.predictor import Predictor
from tasks.prediction.records import PredictionRequest
from tasks.process.cpu_affinity import prefer_for_oom_kill

_NICENESS = 19  # cells that are measured at the same time have priority


def answer_requests(connection: socket.socket) -> None:
    """Answer each line of the connection with one line, until it ends.

    The first line is the file for what this process and the user's models print.
    """
    os.nice(_NICENESS)
    prefer_for_oom_kill()
    warnings.simplefilter("ignore")
    # Collected after each cell instead, without examining torch's many small objects.
    gc.disable()
    predictor, process = Predictor(), os.getpid()
    with connection.makefile("r", encoding="utf-8") as lines:
        _print_to(lines.readline().rstrip("\n"))
        for line in lines:
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


def _print_to(file: str) -> None:
    with open(file, "ab") as output:
        for standard in (1, 2):
            os.dup2(output.fileno(), standard)
