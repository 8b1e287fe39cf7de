"""The predicting process: `python -m tasks.prediction` answers each request line with a prediction.

It ends at the end of its input. With the file descriptor of a lifeline as an argument it is killed
when that closes, so that it never outlives its parent.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings

from tasks.prediction.records import PredictionRequest
from tasks.process.cpu_affinity import prefer_for_oom_kill
from tasks.process.lifeline import die_with_parent

_NICENESS = 19  # cells that are measured at the same time have priority


def main() -> None:
    if sys.argv[1:]:
        die_with_parent(int(sys.argv[1]))
    os.nice(_NICENESS)
    prefer_for_oom_kill()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a user's model may print
    warnings.simplefilter("ignore")
    from tasks.prediction.predictor import Predictor

    predictor = Predictor()
    # Collected after each cell instead, without examining torch's many small objects.
    gc.disable()
    for line in sys.stdin:
        request = PredictionRequest.from_json(line)
        sys.path.extend(path for path in request.import_paths if path not in sys.path)
        print(predictor.predict(request).to_json(), file=answers, flush=True)
        gc.collect()
        gc.freeze()


if __name__ == "__main__":
    main()
