"""CPU time of commands by the number of cells of a run, and the exponent of its growth.

    python benchmarks/growth.py
    python benchmarks/growth.py --cells 1080,5040 plan status

Makes a finished run of each number of cells, and measures each command in a fresh process:

    plan       of the config, without results
    resume     `sweep run` of the finished run, which finds nothing to do
    status     of the run
    table      one table, from the cells that `sweep run` has derived
    report     all tables, charts and the page
    estimates  the duration of each cell, estimated after the one before it has ended

The exponent e of the last two sizes says that n times as many cells take n**e times as long: 1 is
linear, and less than 1 has a part that does not grow. Exit code 1 if an exponent is above --most.
One of 40 cells has failed, as in a real run. The exit code of `resume` is 1 therefore: it says that
not every cell has a result.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from options import run_until_interrupted
from report import ROOT, children_cpu_s, make_run
from tabulate import tabulate

from orchestrator.common.errors import COMPLETED
from orchestrator.planning.duration_estimate import DurationConditions, DurationEstimator
from orchestrator.planning.request import SweepRequest
from orchestrator.store.open import open_for_writing
from tasks.spec.status import Status

CELLS, MOST = (1080, 5040, 20_160), 1.15


def main() -> None:
    """Measure all sizes and print the table."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("names", nargs="*", metavar="COMMAND", help=f"of {', '.join(MEASURES)}")
    parser.add_argument("--cells", type=sizes, default=CELLS, metavar="A,B", help="sizes of runs")
    parser.add_argument("--most", type=float, default=MOST, help=f"highest exponent  [{MOST}]")
    options = parser.parse_args()
    names = options.names or list(MEASURES)
    if unknown := set(names) - set(MEASURES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    rows = []
    for cells in options.cells:
        with tempfile.TemporaryDirectory() as scratch:
            request = make_run(Path(scratch) / "many", cells)
            add_fingerprints(request)
            resume_s = resume(request)  # which also derives the cells, for `table`
            found = [resume_s if name == "resume" else MEASURES[name](request) for name in names]
            rows.append([len(request.expansion.cells), *found])
        print(f"{rows[-1][0]:,} cells measured", flush=True)
    exponents = [exponent(rows, column) for column in range(1, len(names) + 1)]
    print(tabulate([*rows, ["exponent", *exponents]], ["cells", *names], "github", floatfmt=".2f"))
    sys.exit(max(exponents) > options.most)


def sizes(word: str) -> list[int]:
    """Return the numbers of cells of the runs in ascending order."""
    found = sorted(map(int, word.split(",")))
    if len(found) < 2:
        raise argparse.ArgumentTypeError(f"{word}: must be two numbers or more")
    return found


def add_fingerprints(request: SweepRequest) -> None:
    """Complete the manifest of a made-up run, so that `sweep run` continues it."""
    with open_for_writing(request.run) as writer:
        writer.write_manifest({**writer.read_manifest(), "fingerprints": {}})


def exponent(rows: list[list[float]], column: int) -> float:
    """Return the exponent of a column's growth between the last two sizes."""
    before, after = rows[-2:]
    return math.log(after[column] / before[column]) / math.log(after[0] / before[0])


def command_cpu_s(*words: str) -> float:
    """Return the CPU seconds of a command in a fresh process."""
    command = [sys.executable, "-m", "orchestrator", *words]
    before_s = children_cpu_s()
    done = subprocess.run(command, capture_output=True, cwd=ROOT)
    if done.returncode not in COMPLETED:
        raise SystemExit(f"sweep {' '.join(words)} ended with {done.returncode}")
    return children_cpu_s() - before_s


def plan(request: SweepRequest) -> float:
    return command_cpu_s("plan", str(request.config_path), "--out", f"{request.run.folder}-new")


def resume(request: SweepRequest) -> float:
    return command_cpu_s("run", str(request.config_path), "--out", str(request.run.folder))


def status(request: SweepRequest) -> float:
    return command_cpu_s("status", str(request.run.folder))


def table(request: SweepRequest) -> float:
    return command_cpu_s("report", str(request.run.folder), "--table", "timings")


def report(request: SweepRequest) -> float:
    return command_cpu_s("report", str(request.run.folder))


def estimates(request: SweepRequest) -> float:
    """Return the CPU seconds of learning each cell's duration, and estimating the next one's."""
    cells = request.expansion.cells
    estimator = DurationEstimator(cells, {}, DurationConditions("NVIDIA H200"))
    began_s = time.process_time()
    for number, cell in enumerate(cells):
        estimator.seconds(cell)
        estimator.learn(cell, Status.OK, 5.0 + number % 7)
    return time.process_time() - began_s


MEASURES: dict[str, Callable[[SweepRequest], float]] = {
    "plan": plan,
    "resume": resume,
    "status": status,
    "table": table,
    "report": report,
    "estimates": estimates,
}


if __name__ == "__main__":
    run_until_interrupted(main)
