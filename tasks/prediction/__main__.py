"""The predicting process: `python -m tasks.prediction` reads a request a line and answers each with a prediction a line.

It ends when its input does or, whatever it is doing, the lifeline whose file descriptor it may be given: nothing
outlives who asks.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings

from tasks.prediction.records import PredictionRequest
from tasks.process.cpu_affinity import prefer_for_oom_kill
from tasks.process.lifeline import die_with_parent

_NICENESS = 19  # what is measured meanwhile comes first


def main() -> None:
    if sys.argv[1:]:
        die_with_parent(int(sys.argv[1]))
    os.nice(_NICENESS)
    prefer_for_oom_kill()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a model may print: that is no answer
    warnings.simplefilter("ignore")
    from tasks.prediction.predictor import Predictor

    predictor = Predictor()
    gc.disable()  # what a cell leaves is collected after it, and the many small objects of torch are not looked through
    for line in sys.stdin:
        request = PredictionRequest.from_json(line)
        sys.path.extend(path for path in request.import_paths if path not in sys.path)
        print(predictor.predict(request).to_json(), file=answers, flush=True)
        gc.collect()
        gc.freeze()


if __name__ == "__main__":
    main()
