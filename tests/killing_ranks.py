"""Kills or stops processes of cells with several ranks at random moments, and checks what follows.

    python -m tests.killing_ranks --rounds 50 --seed 1
    python -m tests.killing_ranks --rounds 50 --gpus 2
    python -m tests.killing_ranks --rounds 20 --gpus 2 --strike "driver killed"

A real sweep without Ray measures training steps of two and four ranks on the CPU, which communicate
by gloo. With --gpus, the cells have these numbers of GPUs and communicate by NCCL. In each round, at a random moment of a cell, one process is struck: a rank is killed or
stopped, or its minder, the fork server or the driver is killed, all by SIGKILL. A rank is stopped
after the warm-up only, because until then it may be late by 300 s.

It proves, for the moments that it has tried, that

- the row of the cell appears within 5 s, of a stopped rank within collective_timeout_s + 5 s, with the
  status of the fault and, if a rank was struck, with its number;
- a cell goes on if only its fork server dies, and ends with its driver;
- no process of the cell, or of a driver that was killed, lives 5 s later;
- the next cell is well;
- at the end, the memory of all GPUs is free;
- at the end, each cell that all ranks had finished has one row with status ok.

A rank that is struck when its journal has ended may leave a row with status ok. It proves nothing about
Ray: tests/killing.py does. Exit code 1 if anything is wrong; the folder then stays.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pynvml

from orchestrator.hardware.nvml import gpu_uuids
from orchestrator.scheduling.ray_reaper import has_ended
from orchestrator.store.run import Run
from tasks.process.journal import read_journal
from tasks.spec.attempt import ATTEMPT_FILE, JOURNAL_FILE, rank_file, read_attempt
from tasks.spec.status import Status
from tests.conftest import ROOT, sweep_command
from tests.killing import (
    LEFT_S,
    ProcessTree,
    describe,
    lost_and_repeated,
    own_temporary_folder,
    processes_of,
    role_of,
)

_COLLECTIVE_TIMEOUT_S = {"cpu": 2.0, "cuda": 4.0}
# In this order. A new driver, and a new fork server, import torch, which takes most of the time.
STRIKES = (
    "rank killed", "rank stopped", "minder killed", "rank killed", "rank stopped",
    "server killed", "rank killed", "rank stopped", "minder killed", "driver killed",
)  # fmt: skip
ROW_S = 5.0
_NEXT_S = 120.0  # until another cell has ended well, on a busy machine
_CELL_S = 1.5
_NOT_TIMED = ("", "start", "rendezvous", "build", "compile", "warm-up")
CELLS = """
name: killed
limits: {timeout_s: 100, collective_timeout_s: @limit, attempts: 1000}
instruments: [timing]
defaults: {device: @device, context_length: 8, batch_size: 4, vocab_size: 100, warmup_steps: 1, measured_steps: 8}
grids:
  - task: train_step
    fixed: {model: "misbehaving:Model", model_args: {how: slowly, vocab_size: 100}, parallel: ddp}
    axes: {seed: @seeds, @ranks}
"""

Attempt = tuple[str, int]


@dataclass(frozen=True)
class RankProcess:
    """A rank that runs. folder: of its attempt."""

    process: psutil.Process
    folder: Path
    rank: int

    @property
    def attempt(self) -> Attempt:
        return self.folder.parent.name, int(self.folder.name)

    @property
    def group(self) -> int:
        """The number of ranks of its cell."""
        return read_attempt((self.folder / ATTEMPT_FILE).read_text()).cell.params.ranks

    @property
    def journal(self) -> Path:
        return rank_file(self.folder / JOURNAL_FILE, self.rank)

    @property
    def has_finished(self) -> bool:
        return read_journal(self.journal).final is not None


@dataclass
class Sweep:
    """A sweep whose driver is started again after its death."""

    folder: Path
    environment: Mapping[str, str]
    widths: Sequence[int]
    device: str
    cells: int
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        axis = "processes" if self.device == "cpu" else "gpus"
        values = {
            "@limit": f"{self.collective_timeout_s:g}",
            "@device": self.device,
            "@seeds": str(list(range(self.cells // len(self.widths)))),
            "@ranks": f"{axis}: {list(self.widths)}",
        }
        text = re.sub(r"@\w+", lambda found: values[found[0]], CELLS)
        (self.folder / "killed.yaml").write_text(text)
        self.start()

    @property
    def collective_timeout_s(self) -> float:
        return _COLLECTIVE_TIMEOUT_S[self.device]

    @property
    def run(self) -> Path:
        return self.folder / "results" / "killed"

    def start(self) -> None:
        with (self.folder / "output.txt").open("ab") as output:
            self.driver = subprocess.Popen(
                sweep_command("run", "killed.yaml", "--scheduler", "serial"),
                cwd=self.folder,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self.tree = ProcessTree(self.driver.pid)

    def rows(self) -> dict[Attempt, tuple[str, dict[str, object]]]:
        """Return status and evidence of each stored attempt."""
        if not (self.run / "run.json").exists():
            return {}
        columns = ["cell", "attempt", "status", "evidence"]
        return {
            (cell, number): (status, json.loads(evidence))
            for cell, number, status, evidence in Run(self.run).rows("attempts", columns)
        }

    def ranks(self) -> list[RankProcess]:
        """Return the ranks that run, in any order."""
        self.tree.look()
        found = []
        for process in self.tree.living():
            with suppress(psutil.Error):
                title = " ".join(process.cmdline())
                rank = re.match(r"sweep: cell \w+ rank (\d+)", title)
                logs = [Path(one.path) for one in process.open_files() if "journal" in one.path]
                if rank and logs:
                    found.append(RankProcess(process, logs[0].parent, int(rank[1])))
        return found

    def await_row(self, attempt: Attempt, limit_s: float) -> tuple[str, dict[str, object]] | None:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if row := self.rows().get(attempt):
                return row
            time.sleep(0.1)
        return None

    def await_good_cell(self, known: Mapping[Attempt, object]) -> bool:
        """Return True when a cell that had no row has ended well."""
        deadline = time.monotonic() + _NEXT_S
        while time.monotonic() < deadline:
            new = [status for one, (status, _) in self.rows().items() if one not in known]
            if str(Status.OK) in new:
                return True
            if self.driver.poll() is not None:
                break
            time.sleep(0.1)
        return False


def await_rank(
    sweep: Sweep, chance: random.Random, is_ready: Callable[[RankProcess], bool]
) -> RankProcess:
    """Return a rank at a random moment. Raises AssertionError if there is none for long."""
    deadline = time.monotonic() + _NEXT_S
    while time.monotonic() < deadline:
        time.sleep(chance.uniform(0.0, _CELL_S))
        ready = [rank for rank in sweep.ranks() if is_ready(rank)]
        if ready:
            return chance.choice(sorted(ready, key=lambda one: one.rank))
    raise AssertionError(f"no rank for {_NEXT_S:g} s; see output.txt")


def is_timed(rank: RankProcess) -> bool:
    """Return True if a rank has left its warm-up, and so all have."""
    journal = read_journal(rank.journal)
    return journal.stage not in _NOT_TIMED and journal.final is None


def play(sweep: Sweep, strike: str, ranks: int, chance: random.Random) -> str:
    """Strike a cell with this number of ranks, and return what was struck.

    Problems are added to those of the sweep.
    """
    role, _, how = strike.partition(" ")
    rank = await_rank(
        sweep, chance, lambda one: one.group == ranks and (how != "stopped" or is_timed(one))
    )
    known: dict[Attempt, object] = {**sweep.rows(), rank.attempt: ()}
    living = sweep.tree.living()
    group = [one for one in living if role_of(one) in ("rank", "minder")]
    victims = {"rank": [rank.process], "driver": [sweep.tree.root]}
    for one in living:
        if role_of(one) in ("server", "minder"):
            victims.setdefault(role_of(one), []).append(one)
    victim = victims[role][0]
    with suppress(psutil.NoSuchProcess):  # it has just ended
        victim.suspend() if how == "stopped" else victim.kill()
    stage = read_journal(rank.journal).stage
    description = f"{strike} of {ranks} ranks, rank {rank.rank} in {stage or 'its first stage'}"
    if role == "driver":
        sweep.driver.wait()
        group = [*living, *processes_of(sweep.folder)]
    else:
        sweep.problems += wrong_row(sweep, role, how, rank)
    _, left = psutil.wait_procs(group, LEFT_S)
    sweep.problems += [
        f"{description}: left: {describe(one)}" for one in left if not has_ended(one)
    ]
    if role == "driver":
        sweep.start()
    if not sweep.await_good_cell(known):
        sweep.problems.append(f"{description}: no cell was well after it")
    return description


def wrong_row(sweep: Sweep, role: str, how: str, rank: RankProcess) -> list[str]:
    """Wait for the row of the attempt that was struck, and return what is wrong about it."""
    limit_s = ROW_S + (sweep.collective_timeout_s if how == "stopped" else 0.0)
    goes_on = role == "server"
    row = sweep.await_row(rank.attempt, _NEXT_S if goes_on else limit_s)
    what = f"{role} {how}, rank {rank.rank} of {rank.attempt}"
    if row is None:
        return [f"{what}: no row after {limit_s:g} s"]
    status, evidence = row
    if goes_on or (status == Status.OK and rank.has_finished):
        return [] if status == Status.OK else [f"{what}: {status} {evidence}"]
    expected = {"killed": Status.CRASHED, "stopped": Status.TIMEOUT}[how]
    if role == "minder":
        expected = Status.LOST
    if status != expected:
        return [f"{what}: {status} instead of {expected}: {evidence}"]
    if role == "rank" and evidence.get("rank") != rank.rank:
        return [f"{what}: the row names another rank: {evidence}"]
    return []


def used_gpu_bytes() -> list[int]:
    """Return the memory in use on each GPU that this process may use, or [] without one."""
    handles = map(pynvml.nvmlDeviceGetHandleByUUID, gpu_uuids().values())
    return [pynvml.nvmlDeviceGetMemoryInfo(one).used for one in handles]


def finished(run: Path) -> frozenset[Attempt]:
    """Return the attempts whose ranks have all ended well, by their journals."""
    found = set()
    for folder in run.glob("artifacts/*/*"):
        finals = [read_journal(path).final for path in folder.glob("journal*.jsonl")]
        if len(finals) > 1 and all(final and final.status is Status.OK for final in finals):
            found.add((folder.parent.name, int(folder.name)))
    return frozenset(found)


def torture(
    folder: Path,
    rounds: int,
    seed: int,
    widths: Sequence[int] = (2, 4),
    device: str = "cpu",
    strikes: Sequence[str] = STRIKES,
) -> list[str]:
    """Play rounds and return what was wrong. widths: numbers of ranks of the cells."""
    chance, counts = random.Random(seed), Counter[str]()
    with own_temporary_folder(folder) as environment:
        paths = os.pathsep.join([environment["PYTHONPATH"], str(ROOT / "tests" / "support")])
        environment = {**environment, "PYTHONPATH": paths}
        used_before = used_gpu_bytes()
        sweep = Sweep(folder, environment, widths, device, 12 * rounds)
        try:
            for turn in range(rounds):
                began, before = time.monotonic(), len(sweep.problems)
                strike = strikes[turn % len(strikes)]
                # All strikes on cells of one width, then all on those of the next.
                width = widths[turn // len(strikes) % len(widths)]
                description = play(sweep, strike, width, chance)
                counts[strike] += 1
                problems = sweep.problems[before:] or ["well"]
                print(
                    f"{turn + 1}: {description}, {time.monotonic() - began:.1f} s",
                    *problems,
                    flush=True,
                )
            sweep.driver.send_signal(signal.SIGINT)
            sweep.driver.wait(_NEXT_S)
        finally:
            sweep.driver.kill()
            sweep.driver.wait()
        time.sleep(LEFT_S)
        more = [now - then for now, then in zip(used_gpu_bytes(), used_before, strict=True)]
        if max(more, default=0) > 64 * 2**20:
            sweep.problems.append(f"memory of GPUs is not free: {more} bytes")
        ended = finished(sweep.run)
        lost, repeated = lost_and_repeated(sweep.run, ended)
        statuses = Counter(status for status, _ in sweep.rows().values())
    if lost or repeated:
        sweep.problems.append(f"{lost} finished cells lost, {repeated} repeated")
    print(f"{rounds} rounds, seed {seed}: {dict(counts)}; rows: {dict(statuses)}")
    print(f"{len(ended)} cells had finished: {lost} lost, {repeated} repeated; ", end="")
    print(f"{len(sweep.problems)} problems: {sweep.problems}")
    return sweep.problems


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gpus", help="numbers of GPUs of the cells, as in 2,4; default: CPU")
    parser.add_argument("--strike", action="append", choices=sorted(set(STRIKES)))
    options = parser.parse_args()
    widths = tuple(int(one) for one in (options.gpus or "2,4").split(","))
    device = "cuda" if options.gpus else "cpu"
    strikes = options.strike or STRIKES
    folder = Path(tempfile.mkdtemp(prefix="killed-"))
    if torture(folder, options.rounds, options.seed, widths, device, strikes):
        sys.exit(f"see {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
