"""The program, for which a node of a cluster has seconds to answer: `python -m tests.support.impatient run CONFIG --address ADDRESS`."""

from __future__ import annotations

import sys

from orchestrator.cli.main import main
from orchestrator.scheduling import ray_scheduler as schedulers

if __name__ == "__main__":
    schedulers._ANSWER_S, schedulers._LATE_S = (
        40.0,
        4.0,
    )  # enough to import torch, on a busy machine too
    main(sys.argv[1:], prog_name="sweep")
