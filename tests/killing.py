"""A sweep whose driver is killed by -9 at random moments and begun again each time: what is lost, done twice, left behind?

    python -m tests.killing --times 200

By turns on Ray and without; of each two in succession one is killed while it starts, another while it measures. Prints how
many cells had finished when their driver was killed and are in no table, how many have two rows, and how many processes were
left five seconds after their driver. Exit code 1 if any.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pandas as pd
import psutil

from tasks.harness.records import JOURNAL_FILE, Status, read_journal
from tests.conftest import ROOT, sweep_command

Attempts = set[tuple[str, int]]

TESTS = str(ROOT / "tests")
LEFT_S = 5.0
_LONGEST_START_S = 90.0
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
    """The variables of a sweep whose cells may import tests/misbehaving.py, and whose Ray has its files in a folder of its own,
    by which its processes are told: `ray` in `folder` leads there."""
    temporary = tempfile.mkdtemp(prefix="sw", dir="/tmp")  # short: see orchestrator/schedulers.py
    (folder / "ray").symlink_to(temporary)
    yield {"PYTHONPATH": f"{ROOT}:{TESTS}", "TMPDIR": temporary}
    shutil.rmtree(temporary, ignore_errors=True)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Processes of this test that still run: all of them name its folder, or that of its Ray, in their command line or, where
    they were forked from another, in the environment that it was given."""
    found, places = [], (str(folder), str((folder / "ray").resolve()))
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            known_by = f"{' '.join(process.cmdline())} {process.environ().get('TMPDIR', '')}"
            is_ours = any(place in known_by for place in places) and process.pid != os.getpid()
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def leftovers(folder: Path) -> list[str]:
    """Their command lines."""
    words = []
    for process in processes_of(folder):
        with suppress(psutil.Error):
            words.append(" ".join(process.cmdline())[:200])
    return words


def left_after(folder: Path, within_s: float, word: str = "") -> list[str]:
    """Processes, with `word` in their command line, that have not ended by then."""
    deadline = time.monotonic() + within_s
    while left := [words for words in leftovers(folder) if word in words]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.1)
    return []


def begin_and_kill(
    words: Sequence[object], folder: Path, environment: Mapping[str, str], after_s: float, run: Path | None = None
) -> bool:
    """Whether the driver was still at work when its moment came: after so long or, given its run, so long after it first began
    a cell."""
    driver = subprocess.Popen(
        sweep_command(*words), cwd=folder, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    before, deadline = begun(run), time.monotonic() + _LONGEST_START_S
    while run and begun(run) == before and driver.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    try:
        driver.wait(after_s)
    except subprocess.TimeoutExpired:
        driver.kill()
        driver.wait()
        return True
    return False


def begun(run: Path | None) -> int:
    return len(list(run.glob(f"artifacts/*/*/{JOURNAL_FILE}"))) if run else 0


def measured_on_disk(run: Path) -> Attempts:
    """Attempts whose own word of having been measured is on disk, whatever became of their driver."""
    journals = run.glob(f"artifacts/*/*/{JOURNAL_FILE}")
    ended = {(path.parent.parent.name, int(path.parent.name)): read_journal(path).ending for path in journals}
    return {attempt for attempt, ending in ended.items() if ending and ending.status is Status.OK}


def lost_and_repeated(run: Path, finished: Attempts) -> tuple[int, int]:
    """Of a run that came to its end: how many of `finished` are no row, and how many cells were measured more than once."""
    attempts = pd.concat(pd.read_parquet(part) for part in (run / "attempts").glob("*.parquet"))
    ok = attempts[attempts["status"] == "ok"]
    kept = list(zip(ok["cell"], ok["attempt"], strict=True))
    times = Counter(cell for cell, _ in kept)
    return len(finished - set(kept)), sum(count > 1 for count in times.values()) + len(kept) - len(set(kept))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--longest-s", type=float, default=8.0, help="a driver is killed between 0 and this after its beginning")
    parser.add_argument("--cells", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="killed-"))
    with own_temporary_folder(folder) as environment:
        failed = _torture(folder, environment, options)
    shutil.rmtree(folder)
    sys.exit(failed)


def _torture(folder: Path, environment: Mapping[str, str], options: argparse.Namespace) -> bool:
    config, run, chance = folder / "killed.yaml", folder / "results" / "killed", random.Random(options.seed)
    config.write_text(CELLS % ", ".join(map(str, range(options.cells))))
    finished: Attempts = set()
    killed = lingering = 0
    for turn in range(options.times):
        words = ["run", config, *(["--scheduler", "serial"] if turn % 2 else [])]
        moment_s, measuring = chance.uniform(0, options.longest_s), turn // 2 % 2
        killed += begin_and_kill(words, folder, environment, moment_s, run if measuring else None)
        left = left_after(folder, LEFT_S)
        lingering += len(left)
        finished |= measured_on_disk(run)
        print(f"killed {killed} of {turn + 1} drivers, {len(finished)} cells finished", *left, sep="; left: ", flush=True)
        left_after(folder, 120.0)
    subprocess.run(
        sweep_command("run", config, "--scheduler", "serial", "--time-limit", "30s"),
        cwd=folder, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    lost, repeated = lost_and_repeated(run, finished)
    print(f"{killed} kills, {len(finished)} cells had finished: {lost} lost, {repeated} repeated, {lingering} processes left")
    return bool(lost or repeated or lingering)


if __name__ == "__main__":
    main()
