"""CPU time of the commands that people wait for, compared with the imports of pandas and pyarrow.

    python benchmarks/waiting.py
    python benchmarks/waiting.py status table --rounds 3
    git worktree add /tmp/before COMMIT && python benchmarks/waiting.py --against /tmp/before

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
    parser.add_argument("--against", type=Path, help="checkout of another commit of this project")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in COMMANDS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    names = options.names or list(COMMANDS)
    with tempfile.TemporaryDirectory(prefix="waiting-") as scratch:
        own = Checkout.prepared(ROOT, Path(scratch) / "own")
        other = options.against and Checkout.prepared(options.against, Path(scratch) / "other")
        too_slow = [name for name in names if _is_too_slow(name, own, other, options.rounds)]
    sys.exit(bool(too_slow))


@dataclass(frozen=True)
class Checkout:
    """The program at one commit, with copies of the published results that it alone reads."""

    root: Path
    scratch: Path

    @classmethod
    def prepared(cls, root: Path, scratch: Path) -> Checkout:
        """Return a checkout after copying the published results for it."""
        published = scratch / "h200"
        shutil.copytree(PUBLISHED, published)
        shutil.copytree(published / "full", scratch / "full-2")
        return cls(root, scratch)

    def words_of(self, command: Command) -> list[str]:
        """Return the arguments of Python that run a command."""
        words = command.words.replace("PUBLISHED/full-2", str(self.scratch / "full-2"))
        words = words.replace("PUBLISHED", str(self.scratch / "h200"))
        return ["-m", "orchestrator", *words.replace("NEW", str(self.scratch / "new")).split()]

    def cpu_s(self, words: list[str]) -> float:
        """Run Python with some arguments, and return its CPU time and that of its processes."""
        environment = {**os.environ, "XDG_CACHE_HOME": str(self.scratch / "cache")}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, *words],
            cwd=self.root,
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _is_too_slow(name: str, own: Checkout, other: Checkout | None, rounds: int) -> bool:
    """Measure a command, print a line, and return True if it is above its limit."""
    command = COMMANDS[name]
    # The first call compiles modules, and fills the caches of files and charts.
    for checkout in filter(None, (own, other)):
        checkout.cpu_s(checkout.words_of(command))
    costs_s, ratios, others_s = [], [], []
    for _ in range(rounds):
        before_s = own.cpu_s(CALIBRATION)
        costs_s.append(own.cpu_s(own.words_of(command)))
        after_s = own.cpu_s(CALIBRATION)
        ratios.append(2 * costs_s[-1] / (before_s + after_s))
        if other:
            others_s.append(other.cpu_s(other.words_of(command)))
    ratio = median(ratios)
    verdict = "too slow" if ratio > command.limit else "ok"
    figures = f"{median(costs_s):6.2f} CPU-s  {ratio:6.2f} calibrations, at most {command.limit}"
    if other:
        to_other = median(own_s / other_s for own_s, other_s in zip(costs_s, others_s, strict=True))
        figures += f"; there {median(others_s):.2f} CPU-s, here / there {to_other:.2f}"
    print(f"{name:12} {figures}: {verdict}", flush=True)
    return ratio > command.limit


if __name__ == "__main__":
    main()
