"""Kills processes of a sweep at random moments, continues it each time, and checks what remains.

    python -m tests.killing --times 200 --seed 1

Each round begins a driver, on Ray and without by turns, and kills one process while the driver
starts, while it measures, or when its last cell has begun. The process is the driver, or one of
Ray's workers, its gcs_server, raylet or agents, the reaper of these, the fork server, a minder or a
rank. With --stop-s, a driver, a minder or a rank is stopped instead and continues after that time.
A sweep that can continue must measure another cell; one that lost a process of Ray must end with
one line and exit code 2. Between rounds the sweep grows; at last it runs to its end.

Printed are cells that had finished and are in no table, cells with two results, cells that the last
run left undone, outputs with a traceback, and processes that live five seconds after their driver.
Processes are recognised by the process tree before the kill and by their open files and working
folder afterwards. Exit code 1 if anything is wrong: the folder then stays. If a sweep stopped to
measure, it also has Ray's logs and a description of the processes, with their stacks if py-spy is
installed.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pandas as pd
import psutil

from orchestrator.common.errors import COMPLETED, EXIT_INTERRUPTED, EXIT_USER
from orchestrator.scheduling.ray_reaper import RAY_FOLDER, has_ended
from orchestrator.store.run import Run
from tasks.process.journal import read_journal
from tasks.spec.attempt import JOURNAL_FILE
from tasks.spec.status import Status
from tests.conftest import ROOT, sweep_command

T = TypeVar("T")
Attempts = frozenset[tuple[str, int]]
STOPPED = ("minder", "rank")  # besides the driver
MOMENTS = ("starting", "measuring", "ending")

TESTS = str(ROOT / "tests")
LEFT_S = 5.0
_LONGEST_START_S = 120.0
_LONGEST_END_S = 20.0
RAY = ("gcs_server", "raylet")
# A raylet ends when one of its agents does.
AGENT_TITLES = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
# By the begin of the title of a process.
ROLES = {"fork server": "server", "minder": "minder", "cell": "rank", "reaper": "reaper"}
# Cells more than have begun: more than a driver comes to, or so few that it ends.
_MANY, _FEW = 1000, 3
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
    """Yield variables for a sweep whose cells may import tests/support/misbehaving.py.

    Its Ray writes to a temporary folder, to which the link `ray` in `folder` leads. Its processes
    are recognised by that folder.
    """
    # The path is short, because those of Ray's sockets must be.
    temporary = tempfile.mkdtemp(prefix="sw", dir="/tmp")
    (folder / "ray").symlink_to(temporary)
    # Packages may be on this process's own path, too.
    paths = [str(ROOT), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    yield {"PYTHONPATH": os.pathsep.join(paths), "TMPDIR": temporary}
    shutil.rmtree(temporary, ignore_errors=True)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return the processes of a test that still run.

    Each has a file open below the test's folder or below that of its Ray, or works there, or names
    one of them in its command line.
    """
    found, places = [], [str(folder), str((folder / "ray").resolve())]
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            known_by = [" ".join(process.cmdline()), *open_paths(process.pid)]
            is_ours = any(place in path for place in places for path in known_by)
            if is_ours and process.pid != os.getpid() and not has_ended(process):
                found.append(process)
    return found


def open_paths(pid: int) -> list[str]:
    """Return the working folder of a process and the files that it has open or mapped."""
    process, paths = Path(f"/proc/{pid}"), []
    with suppress(OSError):  # it has ended, or is another user's
        for link in (process / "cwd", *(process / "fd").iterdir()):
            with suppress(OSError):
                paths.append(os.readlink(link))
        paths.append((process / "maps").read_text())
    return paths


def asked_of_each(folder: Path, ask: Callable[[psutil.Process], T]) -> list[T]:
    """Return the answers of a test's processes, without those that end meanwhile."""
    answers = []
    for process in processes_of(folder):
        with suppress(psutil.Error):
            answers.append(ask(process))
    return answers


def leftovers(folder: Path) -> list[str]:
    """Return the command lines of a test's processes."""
    return asked_of_each(folder, lambda process: " ".join(process.cmdline())[:200])


def left_after(folder: Path, within_s: float, word: str = "") -> list[str]:
    """Return the command lines that contain `word` of processes that outlive the time limit."""
    deadline = time.monotonic() + within_s
    while left := [words for words in leftovers(folder) if word in words]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.1)
    return []


class ProcessTree:
    """A process and all descendants that it has had, by process id and start time."""

    def __init__(self, pid: int) -> None:
        self.root = psutil.Process(pid)
        self.seen = {self.root}

    def look(self) -> None:
        """Add the descendants of all processes that were seen, also of orphans."""
        known, parents = {process.pid for process in self.seen}, dict[int, list[psutil.Process]]()
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                parents.setdefault(process.ppid(), []).append(process)
        while known:
            children = parents.pop(known.pop(), [])
            self.seen.update(children)
            known.update(process.pid for process in children)

    def living(self) -> list[psutil.Process]:
        return [process for process in self.seen if not has_ended(process)]


def role_of(process: psutil.Process) -> str:
    """Return which of the processes that are killed this is, or an empty string."""
    with suppress(psutil.Error):
        words = process.cmdline()
        if process.name() in ("gcs_server", "raylet"):
            return process.name()
        for title, role in ROLES.items():
            if words and words[0].startswith(f"sweep: {title}"):
                return role
        if words and words[0] in AGENT_TITLES:
            return "agent"
        if words and (words[0].startswith("ray::") or "default_worker.py" in " ".join(words)):
            return "worker"
    return ""


@dataclass(frozen=True)
class Round:
    """One driver and the moment at which one of its processes is killed.

    after_s: how long after `cells` cells of its run have begun.
    stop_s: for how long a process is stopped; 0: it is killed.
    """

    command: Sequence[str]
    folder: Path
    environment: Mapping[str, str]
    run: Path
    after_s: float
    cells: int
    stop_s: float = 0.0


@dataclass
class Ending:
    """The result of a round. An empty victim means that the driver ended before its moment."""

    victim: str = ""
    code: int | None = None
    took_s: float = 0.0
    problems: list[str] = field(default_factory=list)


def play(one: Round, chance: random.Random, kills: Mapping[str, int]) -> Ending:
    """Begin a driver, kill one process at the moment, and watch until all have ended.

    kills: how many processes of each role were killed before.
    """
    log = one.folder / "output.txt"
    with log.open("wb") as output:
        driver = subprocess.Popen(
            one.command,
            cwd=one.folder,
            env={**os.environ, **one.environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    tree, ending = ProcessTree(driver.pid), Ending()
    if _await_moment(driver, tree, one):
        ending.victim, victim = _choose(tree, chance, kills, STOPPED if one.stop_s else ())
        _strike(victim, one.stop_s)
        ending.problems += _watch(driver, tree, ending, one)
    driver.wait()
    ended = time.monotonic()
    while left := {*tree.living(), *processes_of(one.folder)}:
        if time.monotonic() - ended > LEFT_S:
            ending.problems += [f"left: {describe(process)}" for process in left]
            break
        time.sleep(0.1)
    ending.code = driver.returncode
    text = log.read_text(errors="replace")
    if "Traceback" in text:
        ending.problems.append(f"traceback: {text[-3000:]}")
    ending.problems += _unexpected_end(ending, text)
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    return ending


def describe(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"{process.pid} {process.name()} {' '.join(process.cmdline())[:200]}"
    return str(process.pid)


def keep_evidence(tree: ProcessTree, folder: Path) -> None:
    """Write what the processes of a sweep wait for to `folder`, and copy the logs of its Ray."""
    spy, texts = shutil.which("py-spy"), []
    for process in sorted(tree.living(), key=lambda process: process.pid):
        with suppress(psutil.Error, OSError):
            waits_in = Path(f"/proc/{process.pid}/wchan").read_text()
            age_s = time.time() - process.create_time()
            texts.append(
                f"{describe(process)}\n  child of {process.ppid()}, {age_s:.0f} s old, "
                f"{process.status()} in {waits_in}"
            )
            if spy:
                command = [spy, "dump", "--pid", str(process.pid)]
                texts.append(subprocess.run(command, capture_output=True, text=True).stdout)
    (folder / "stalled.txt").write_text("\n".join(texts))
    shutil.copy(folder / "output.txt", folder / "stalled-output.txt")
    for logs in (folder / "ray").resolve().glob(f"*/{RAY_FOLDER}/session_2*/logs"):
        shutil.copytree(logs, folder / f"stalled-{logs.parent.name}", dirs_exist_ok=True)


def _await_moment(driver: subprocess.Popen[bytes], tree: ProcessTree, one: Round) -> bool:
    """Wait for the moment. Return False if the driver ends before."""
    longest = time.monotonic() + _LONGEST_START_S
    while begun(one.run) < one.cells and time.monotonic() < longest and driver.poll() is None:
        tree.look()
        time.sleep(0.05)
    deadline = time.monotonic() + one.after_s
    while time.monotonic() < deadline and driver.poll() is None:
        tree.look()
        time.sleep(0.05)
    tree.look()
    return driver.poll() is None


def _choose(
    tree: ProcessTree, chance: random.Random, kills: Mapping[str, int], only: Collection[str] = ()
) -> tuple[str, psutil.Process]:
    """Choose the role that was struck least among those that exist now, and a process of it."""
    by_role = {"driver": [tree.root]}
    for process in sorted(tree.living(), key=lambda process: process.pid):
        role = role_of(process)
        if process != tree.root and role and (not only or role in only):
            by_role.setdefault(role, []).append(process)
    fewest = min(kills.get(role, 0) for role in by_role)
    role = chance.choice([role for role in sorted(by_role) if kills.get(role, 0) == fewest])
    return role, chance.choice(by_role[role])


def _strike(victim: psutil.Process, stop_s: float) -> None:
    """Kill a process, or stop it for a while."""
    if not stop_s:
        victim.kill()
        return
    victim.suspend()
    time.sleep(stop_s)
    with suppress(psutil.Error):  # somebody else may have killed it
        victim.resume()


def _watch(
    driver: subprocess.Popen[bytes], tree: ProcessTree, ending: Ending, one: Round
) -> list[str]:
    """Wait for what must happen after a kill: the driver's end, or another cell."""
    killed, before = time.monotonic(), journals(one.run)
    ends = ending.victim in ("driver", "agent", *RAY) and not one.stop_s
    limit_s = _LONGEST_END_S if ends else _LONGEST_START_S
    while driver.poll() is None and (ends or journals(one.run) < before + 2):
        if time.monotonic() - killed > limit_s:
            keep_evidence(tree, one.folder)
            driver.kill()
            return [f"after the kill of {ending.victim}, nothing happened for {limit_s:g} s"]
        tree.look()
        time.sleep(0.05)
    ending.took_s = time.monotonic() - killed
    while driver.poll() is None:
        driver.send_signal(signal.SIGINT)
        try:
            driver.wait(_LONGEST_START_S)
        except subprocess.TimeoutExpired:
            driver.kill()
            return [f"did not end {_LONGEST_START_S:g} s after SIGINT"]
    return []


def _unexpected_end(ending: Ending, text: str) -> list[str]:
    if ending.victim == "driver":
        return []
    died = "raylet" if ending.victim == "agent" else ending.victim
    if died in RAY and ending.code == EXIT_USER and f"Ray's {died}" in text:
        return []
    if ending.code in (*COMPLETED, EXIT_INTERRUPTED):
        return []
    return [f"exit code {ending.code}: {text[-1000:]}"]


def journals(run: Path) -> int:
    """Return how many measuring processes have begun. Two more mean that one cell has ended."""
    return len(list(run.glob(f"artifacts/*/*/{JOURNAL_FILE}")))


def begun(run: Path) -> int:
    """Return how many cells have begun."""
    return len(os.listdir(run / "artifacts")) if (run / "artifacts").exists() else 0


def measured_on_disk(run: Path, known: Attempts = frozenset()) -> Attempts:
    """Return the attempts whose journals say that they were measured, whatever their driver did.

    known: attempts that are not read again.
    """
    found = set(known)
    for path in run.glob(f"artifacts/*/*/{JOURNAL_FILE}"):
        attempt = (path.parent.parent.name, int(path.parent.name))
        ending = None if attempt in found else read_journal(path).final
        if ending and ending.status is Status.OK:
            found.add(attempt)
    return frozenset(found)


def lost_and_repeated(run: Path, finished: Attempts) -> tuple[int, int]:
    """Return how many finished attempts of a run have no row, and how many cells have two."""
    attempts = Run(run).read("attempts")
    ok = attempts[attempts["status"] == "ok"]
    rows = list(zip(ok["cell"], ok["attempt"], strict=True))
    lost = finished - set(rows)
    repeated_cells = sum(count > 1 for count in Counter(cell for cell, _ in rows).values())
    repeated_rows = len(rows) - len(set(rows))
    return len(lost), repeated_cells + repeated_rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument(
        "--longest-s",
        type=float,
        default=8.0,
        help="a process is killed between 0 and this after its moment began",
    )
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no round after this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stop-s", type=float, default=0.0, help="stop a process for this time")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="killed-"))
    with own_temporary_folder(folder) as environment:
        failed = _torture(folder, environment, options)
    if failed:
        print(f"see {folder}")
    else:
        shutil.rmtree(folder)
    sys.exit(failed)


def _torture(folder: Path, environment: Mapping[str, str], options: argparse.Namespace) -> bool:
    config, run = folder / "killed.yaml", folder / "results" / "killed"
    chance, last = random.Random(options.seed), time.monotonic() + 60 * options.minutes
    finished: Attempts = frozenset()
    kills = {"ray": Counter[str](), "serial": Counter[str]()}
    problems, turn, total = list[str](), 0, 0
    while total < options.times and time.monotonic() < last:
        name, scheduler = MOMENTS[turn // 2 % len(MOMENTS)], ("ray", "serial")[turn % 2]
        turn += 1
        cells = begun(run) + (_FEW if name == "ending" else _MANY)
        config.write_text(CELLS % ", ".join(map(str, range(cells))))
        awaited = {"starting": 0, "measuring": begun(run) + 1, "ending": cells}[name]
        longest_s = options.longest_s if name != "ending" else options.longest_s / 4
        command = sweep_command("run", config, "--scheduler", scheduler)
        after_s = chance.uniform(0, longest_s)
        one = Round(command, folder, environment, run, after_s, awaited, options.stop_s)
        ending = play(one, chance, kills[scheduler])
        if ending.victim:
            kills[scheduler][ending.victim] += 1
        total = sum(each.total() for each in kills.values())
        problems += ending.problems
        finished = measured_on_disk(run, finished)
        print(
            f"{total} kills, {turn} drivers, {len(finished)} cells finished: {scheduler} "
            f"{name} {after_s:.1f} s: {ending.victim or 'ended before'}, exit {ending.code}, "
            f"{ending.took_s:.1f} s",
            *ending.problems,
            sep="\n    ",
            flush=True,
        )
    cells = begun(run) + _FEW
    config.write_text(CELLS % ", ".join(map(str, range(cells))))
    subprocess.run(
        sweep_command("run", config, "--scheduler", "serial"),
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        check=False,
    )
    lost, repeated = lost_and_repeated(run, finished)
    undone = cells - len(pd.read_parquet(run / "cells.parquet").query("status == 'ok'"))
    print(f"{total} kills, seed {options.seed}: { ({name: dict(kills[name]) for name in kills}) }")
    print(f"{len(finished)} cells had finished: {lost} lost, {repeated} repeated, ", end="")
    print(f"{undone} of {cells} undone, {len(problems)} problems: {problems}")
    return bool(lost or repeated or undone or problems)


if __name__ == "__main__":
    main()
