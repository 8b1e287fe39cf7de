"""The predicting process: `python -m tasks.prediction` answers each request line with a prediction.

It ends at the end of its input. With the file descriptor of a lifeline as an argument it is killed
when that closes, so that it never outlives the user's command. Each further argument has the file
descriptors of another predicting process: for requests, answers and errors, and a lifeline. All are
forked from a process that has imported torch and only waits.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
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
    from tasks.prediction.predictor import Predictor

    # Collected after each cell instead, without examining torch's many small objects.
    gc.disable()
    gc.freeze()
    if not _fork_others([list(map(int, ends.split(","))) for ends in others]):
        _fork_first()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a user's model may print
    predictor, process = Predictor(), os.getpid()
    for line in sys.stdin:
        request = PredictionRequest.from_json(line)
        sys.path.extend(path for path in request.import_paths if path not in sys.path)
        prediction = predictor.predict(request)
        # A user's model that forks may return here in the child, too, whose answer would be taken
        # for that of the next request.
        if os.getpid() != process:
            os._exit(0)
        print(prediction.to_json(), file=answers, flush=True)
        gc.collect()
        gc.freeze()


def _fork_others(others: Sequence[Sequence[int]]) -> bool:
    """Fork a process for each of these file descriptors, and return True in each of them."""
    descriptors = set(chain(*others))
    for requests, answers, errors, lifeline in others:
        if os.fork() == 0:
            os.setsid()  # its lifeline kills its process group
            for standard, end in enumerate((requests, answers, errors)):
                os.dup2(end, standard)
            # A pipe ends only when all processes have closed its other end.
            _close(descriptors - {lifeline})
            die_with_parent(lifeline)
            return True
    _close(descriptors)
    return False


def _fork_first() -> None:
    """Return in a forked process, and end this one with it.

    So the parent of every process that runs a user's model is this one, which predicts nothing: a
    model that kills its parent ends neither the user's command nor another prediction.
    """
    first = os.fork()
    if first:
        os.waitpid(first, 0)
        os._exit(0)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


if __name__ == "__main__":
    main()
