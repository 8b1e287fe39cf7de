"""Runs `sweep` with short time limits for the answers of nodes.

python -m tests.support.impatient run CONFIG --address ADDRESS
"""

from __future__ import annotations

import sys

from orchestrator.cli.main import main
from orchestrator.scheduling import cluster

if __name__ == "__main__":
    # Enough to import torch, on a busy machine too.
    cluster.ANSWER_S, cluster._LATE_S = 40.0, 4.0
    main(sys.argv[1:], prog_name="sweep")
