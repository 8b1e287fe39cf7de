"""A sweep whose driver is killed by -9 at random moments and begun again each time: what is lost, done twice, left behind?

    python -m tests.killing --times 200

By turns on Ray and without; by turns while it starts, while it measures, and when its last cell has begun, so that it writes
and ends. A driver that ends before its moment does not count. Between kills the sweep grows, so that there is always something
to measure and always an end near; at last it runs to its end. Prints how many cells had finished when their driver was killed
and are in no table, how many have two rows, how many the last run left undone, and how many processes were left five seconds
after their driver. Exit code 1 if any.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pandas as pd
import psutil

from orchestrator.scheduling.ray_reaper import written_files
from tasks.process.journal import read_journal
from tasks.spec.attempt import JOURNAL_FILE
from tasks.spec.status import Status
from tests.conftest import ROOT, sweep_command

T = TypeVar("T")
Attempts = frozenset[tuple[str, int]]
MOMENTS = ("starting", "measuring", "ending")

TESTS = str(ROOT / "tests")
LEFT_S = 5.0
_LONGEST_START_S = 90.0
_MANY, _FEW = (
    1000,
    3,
)  # cells more than have begun: more than a driver comes to, or so few that it ends
CELLS = """
name: killed
limits: {timeout_s: 60, attempts: 1000}
grids:
  - task: accumulation
    fixed: {device: cpu, count: 1}
    axes: {seed: [%s]}
"""


@contextmanager
def own_temporary_folder(folder: Path) -> Iterator[dict[str, str]]:
    """The variables of a sweep whose cells may import tests/support/misbehaving.py, and whose Ray has its files in a folder of its own,
    by which its processes are told: `ray` in `folder` leads there."""
    temporary = tempfile.mkdtemp(
        prefix="sw", dir="/tmp"
    )  # short: see orchestrator/scheduling/ray_scheduler.py
    (folder / "ray").symlink_to(temporary)
    yield {"PYTHONPATH": f"{ROOT}:{TESTS}", "TMPDIR": temporary}
    shutil.rmtree(temporary, ignore_errors=True)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return the processes of a test that still run.

    Each names the test's folder, or that of its Ray, in its command line, its environment or the
    files that it writes.
    """
    found, places = [], (str(folder), str((folder / "ray").resolve()))
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            known_by = f"{' '.join(process.cmdline())} {process.environ().get('TMPDIR', '')}"
            # Ray's agents may have overwritten both, but have log files open.
            known_by += " ".join(written_files(process.pid))
            is_ours = any(place in known_by for place in places) and process.pid != os.getpid()
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def asked_of_each(folder: Path, ask: Callable[[psutil.Process], T]) -> list[T]:
    """Of its processes; those that end meanwhile are left out."""
    answers = []
    for process in processes_of(folder):
        with suppress(psutil.Error):
            answers.append(ask(process))
    return answers


def leftovers(folder: Path) -> list[str]:
    """Their command lines."""
    return asked_of_each(folder, lambda process: " ".join(process.cmdline())[:200])


def left_after(folder: Path, within_s: float, word: str = "") -> list[str]:
    """Processes, with `word` in their command line, that have not ended by then."""
    deadline = time.monotonic() + within_s
    while left := [words for words in leftovers(folder) if word in words]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.1)
    return []


@dataclass(frozen=True)
class Moment:
    """When a driver is killed: so long after it began, or after so many cells of its run have."""

    after_s: float
    cells: int = 0


def begin_and_kill(
    words: Sequence[object], folder: Path, environment: Mapping[str, str], run: Path, moment: Moment
) -> bool:
    """Whether the driver was still at work when its moment came."""
    driver = subprocess.Popen(
        sweep_command(*words),
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + _LONGEST_START_S
    while begun(run) < moment.cells and driver.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    try:
        driver.wait(moment.after_s)
    except subprocess.TimeoutExpired:
        driver.kill()
        driver.wait()
        return True
    return False


def begun(run: Path) -> int:
    """How many cells have been begun."""
    return len(os.listdir(run / "artifacts")) if (run / "artifacts").exists() else 0


def measured_on_disk(run: Path, known: Attempts = frozenset()) -> Attempts:
    """Attempts whose own word of having been measured is on disk, whatever became of their driver. known: not read again."""
    found = set(known)
    for path in run.glob(f"artifacts/*/*/{JOURNAL_FILE}"):
        attempt = (path.parent.parent.name, int(path.parent.name))
        ending = None if attempt in found else read_journal(path).final
        if ending and ending.status is Status.OK:
            found.add(attempt)
    return frozenset(found)


def lost_and_repeated(run: Path, finished: Attempts) -> tuple[int, int]:
    """Of a run that came to its end: how many of `finished` are no row, and how many cells were measured more than once."""
    attempts = pd.concat(pd.read_parquet(part) for part in (run / "attempts").glob("*.parquet"))
    ok = attempts[attempts["status"] == "ok"]
    kept = list(zip(ok["cell"], ok["attempt"], strict=True))
    times = Counter(cell for cell, _ in kept)
    return len(finished - set(kept)), sum(count > 1 for count in times.values()) + len(kept) - len(
        set(kept)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument(
        "--longest-s",
        type=float,
        default=8.0,
        help="a driver is killed between 0 and this after its moment began",
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="killed-"))
    with own_temporary_folder(folder) as environment:
        failed = _torture(folder, environment, options)
    shutil.rmtree(folder)
    sys.exit(failed)


def _torture(folder: Path, environment: Mapping[str, str], options: argparse.Namespace) -> bool:
    config, run, chance = (
        folder / "killed.yaml",
        folder / "results" / "killed",
        random.Random(options.seed),
    )
    finished: Attempts = frozenset()
    kills: Counter[str] = Counter()
    lingering = turn = 0
    while kills.total() < options.times:
        name, scheduler = MOMENTS[turn // 2 % len(MOMENTS)], ("ray", "serial")[turn % 2]
        turn += 1
        cells = begun(run) + (_FEW if name == "ending" else _MANY)
        config.write_text(CELLS % ", ".join(map(str, range(cells))))
        awaited = {"starting": 0, "measuring": begun(run) + 1, "ending": cells}[name]
        longest_s = options.longest_s if name != "ending" else options.longest_s / 4
        moment = Moment(chance.uniform(0, longest_s), awaited)
        kills[name] += begin_and_kill(
            ["run", config, "--scheduler", scheduler], folder, environment, run, moment
        )
        left = left_after(folder, LEFT_S)
        lingering += len(left)
        finished = measured_on_disk(run, finished)
        done = ", ".join(f"{count} {name}" for name, count in kills.items())
        print(
            f"{done}: of {turn} drivers; {len(finished)} cells finished",
            *left,
            sep="; left: ",
            flush=True,
        )
        left_after(folder, 120.0)
    cells = begun(run) + _FEW
    config.write_text(CELLS % ", ".join(map(str, range(cells))))
    subprocess.run(
        sweep_command("run", config, "--scheduler", "serial"),
        cwd=folder, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    lost, repeated = lost_and_repeated(run, finished)
    undone = cells - len(pd.read_parquet(run / "cells.parquet").query("status == 'ok'"))
    print(
        f"{kills.total()} kills, {len(finished)} cells had finished: {lost} lost, {repeated} repeated,",
        end=" ",
    )
    print(f"{undone} of {cells} undone, {lingering} processes left")
    return bool(lost or repeated or undone or lingering)


if __name__ == "__main__":
    main()
