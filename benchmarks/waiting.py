"""CPU time of the commands that people wait for, compared with the imports of pandas and pyarrow.

    python benchmarks/waiting.py
    python benchmarks/waiting.py status table --rounds 3

Runs each command on a copy of the published results, in alternation with a calibration:
`python -c "import pandas, pyarrow.compute"`. Prints the median CPU time of a command with all its
processes, and the median ratio to the calibrations before and after it. The load of the machine
changes a time, but not much of such a ratio. Exit code 1 if a ratio is above its limit.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from options import at_least

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ROOT / "results" / "published" / "h200"
CALIBRATION = ["-c", "import pandas, pyarrow.compute"]


@dataclass(frozen=True)
class Command:
    """A `sweep` command and its limit.

    words: may contain PUBLISHED, the copy of the publication, and NEW, a folder that does not exist.
    limit: greatest ratio to the calibration.
    """

    words: str
    limit: float


COMMANDS = {
    "help": Command("--help", 0.4),
    "plan": Command("plan configs/full.yaml --out NEW", 1.1),
    "status": Command("status PUBLISHED/full", 1.4),
    "show": Command("show PUBLISHED/full 0092", 2.7),
    "compare": Command("compare PUBLISHED/full PUBLISHED/full-2", 4.0),
    "table": Command("report PUBLISHED/full --table precision", 2.3),
    "report": Command("report PUBLISHED/full", 9.0),
    "publication": Command("report PUBLISHED", 27.0),
}


def main() -> None:
    """Measure the commands in turn, and print one line for each."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(COMMANDS)}")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in COMMANDS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    names = options.names or list(COMMANDS)
    with tempfile.TemporaryDirectory(prefix="waiting-") as scratch:
        published = Path(scratch) / "h200"
        shutil.copytree(PUBLISHED, published)
        shutil.copytree(published / "full", Path(scratch) / "full-2")
        too_slow = [name for name in names if _is_too_slow(name, Path(scratch), options.rounds)]
    sys.exit(bool(too_slow))


def _is_too_slow(name: str, scratch: Path, rounds: int) -> bool:
    """Measure a command, print a line, and return True if it is above its limit."""
    command = COMMANDS[name]
    words = command.words.replace("PUBLISHED/full-2", str(scratch / "full-2"))
    words = words.replace("PUBLISHED", str(scratch / "h200")).replace("NEW", str(scratch / "new"))
    sweep = ["-m", "orchestrator", *words.split()]
    # The first call compiles modules, and fills the caches of files and charts.
    _cpu_s(sweep, scratch)
    costs_s, ratios = [], []
    for _ in range(rounds):
        before_s = _cpu_s(CALIBRATION, scratch)
        costs_s.append(_cpu_s(sweep, scratch))
        after_s = _cpu_s(CALIBRATION, scratch)
        ratios.append(2 * costs_s[-1] / (before_s + after_s))
    ratio = median(ratios)
    verdict = "too slow" if ratio > command.limit else "ok"
    figures = f"{median(costs_s):6.2f} CPU-s  {ratio:6.2f} calibrations, at most {command.limit}"
    print(f"{name:12} {figures}: {verdict}", flush=True)
    return ratio > command.limit


def _cpu_s(words: list[str], scratch: Path) -> float:
    """Run Python with some arguments, and return its CPU time and that of its processes."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(scratch / "cache")}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
