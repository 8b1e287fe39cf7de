"""The predicting process: `python -m tasks.prediction` answers each request line with a prediction.

It ends at the end of its input. With the file descriptor of a lifeline as an argument it is killed
when that closes, so that it never outlives the user's command. Each further argument has the file
descriptors of another predicting process, which is forked from this one when it has imported torch:
for requests, answers and errors, and a lifeline.

Each model is predicted in another forked process, whose parent only waits. So if a user's model
changes a function of torch or kills its parent process, other models are predicted as before.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain

from tasks.prediction.records import PredictionRequest
from tasks.process.cpu_affinity import prefer_for_oom_kill
from tasks.process.lifeline import die_with_parent

_NICENESS = 19  # cells that are measured at the same time have priority


def main() -> None:
    lifelines, others = sys.argv[1:2], sys.argv[2:]
    for lifeline in lifelines:
        die_with_parent(int(lifeline))
    os.nice(_NICENESS)
    prefer_for_oom_kill()
    warnings.simplefilter("ignore")
    importlib.import_module("tasks.prediction.predictor")

    # Collected after each cell instead, without examining torch's many small objects.
    gc.disable()
    gc.freeze()
    _fork_others([list(map(int, ends.split(","))) for ends in others])
    request = _answer_in_fork([])
    while request:
        request = _answer_in_fork([request])


def _answer_in_fork(requests: Sequence[str]) -> str:
    """Answer these requests and those that follow for the same model, in a forked process.

    Return the next request, or an empty text if there is none or the process has died.
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        try:
            _answer(requests, theirs)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)  # whatever was raised: the code behind this line is the parent's
    os.close(theirs)
    with os.fdopen(ours, encoding="utf-8") as unanswered:
        # One line only: a process that the model started may keep the pipe open.
        request = unanswered.readline()
    os.waitpid(child, 0)
    return request


def _answer(requests: Sequence[str], unanswered: int) -> None:
    """Answer these requests and those from stdin, until one needs other code of the user.

    unanswered: the file descriptor for that one.
    """
    from tasks.prediction.predictor import Predictor

    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a user's model may print
    predictor, process = Predictor(), os.getpid()
    code: tuple[str, ...] | None = None
    for line in chain(requests, sys.stdin):
        request = PredictionRequest.from_json(line)
        if code not in (None, request.foreign_code):
            # Without a reader, which the model may have killed, this process answers all others.
            with suppress(BrokenPipeError):
                os.write(unanswered, line.encode())
                return
        code = request.foreign_code
        sys.path.extend(path for path in request.import_paths if path not in sys.path)
        prediction = predictor.predict(request)
        # A user's model that forks may return here in the child, too, whose answer would be taken
        # for that of the next request.
        if os.getpid() != process:
            os._exit(0)
        print(prediction.to_json(), file=answers, flush=True)
        gc.collect()
        gc.freeze()


def _fork_others(others: Sequence[Sequence[int]]) -> None:
    """Fork a process for each of these file descriptors, and return in all processes."""
    descriptors = set(chain(*others))
    for requests, answers, errors, lifeline in others:
        if os.fork() == 0:
            os.setsid()  # its lifeline kills its process group
            for standard, end in enumerate((requests, answers, errors)):
                os.dup2(end, standard)
            # A pipe ends only when all processes have closed its other end.
            _close(descriptors - {lifeline})
            die_with_parent(lifeline)
            return
    _close(descriptors)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


if __name__ == "__main__":
    main()
