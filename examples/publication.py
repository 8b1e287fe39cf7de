"""All that is published of the H200, measured on the GPUs that are here: one study after the other, and then one folder of them.

    python examples/publication.py --out results/mine --minutes 480
    python examples/publication.py --out results/mine --publish results/published/mine
    python examples/publication.py --out results/mine --only kernels,numerics -- --address auto

Each study is a `sweep run` into a folder of its own, as `examples/publication.yaml` says; what follows `--` is given to each.
Whatever ends this, it is called again and does what is missing: exit code 75 says that the minutes were over. `--publish` then
puts all studies that are there into a folder that others may have.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ruamel.yaml import YAML

from orchestrator.errors import EXIT_TIME_LIMIT
from orchestrator.run import git_commit
from orchestrator.store import Run

_STUDIES = Path(__file__).with_suffix(".yaml")
_ENDED = (0, 1)  # exit codes of a sweep that came to its end, where a cell may have failed


def main() -> None:
    options = _options()
    said: dict[str, str] = YAML(typ="safe").load(options.studies)
    if strangers := set(options.only) - set(said):
        sys.exit(f"publication.py: {options.studies} names no study {', '.join(sorted(strangers))}")
    if (git_commit() or "+").endswith("+"):
        print("publication.py: what is measured now is of no commit: others cannot repeat it", file=sys.stderr)
    ends = time.monotonic() + options.minutes * 60
    for name in options.only or said:
        measure([*shlex.split(said[name]), *options.more], options.out / name, ends)
    if options.publish:
        there = [str(options.out / name) for name in said if Run(options.out / name).exists]
        sys.exit(sweep("publish", *there, "--out", str(options.publish)))


def measure(words: Sequence[str], out: Path, ends: float) -> None:
    """ends: as time.monotonic() tells it. Ends this program where a sweep does not come to its end."""
    left_s = ends - time.monotonic()
    if left_s <= 0:
        sys.exit(EXIT_TIME_LIMIT)
    print(f"== {out.name}", flush=True)
    code = sweep("run", *words, "--out", str(out), *([] if left_s == float("inf") else ["--time-limit", f"{left_s:.0f}s"]))
    if code not in _ENDED:
        sys.exit(code)


def sweep(*words: str) -> int:
    """Calls it as a user does, and lets it end in order where it is interrupted."""
    process = subprocess.Popen([sys.executable, "-m", "orchestrator", *words])
    signal.signal(signal.SIGINT, lambda *_: None)  # a terminal sends it to both
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    return process.wait()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for a folder a study")
    parser.add_argument("--only", type=lambda names: names.split(","), default=[], metavar="STUDY,STUDY")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no cell that would not end within them")
    parser.add_argument("--publish", type=Path, metavar="FOLDER")
    parser.add_argument("--studies", type=Path, default=_STUDIES, help=f"  [examples/{_STUDIES.name}]")
    parser.add_argument("more", nargs="*", metavar="-- OPTION")
    return parser.parse_args()


if __name__ == "__main__":
    main()
