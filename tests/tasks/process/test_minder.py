"""The minder ends everything of an attempt, whatever ends first: a rank, its client, a limit."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from setproctitle import getproctitle

from tasks.process.minder import STACK_SIGNAL, MindRequest, RankExits, mind

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="minders are for Linux"),
]
KILLED = -signal.SIGKILL
SLEEP_S = 600.0  # longer than any test

# Minders are forked from a new process, which has found the memory for its title. This one may have
# another environment by the time of a test, and would not find it then.
os.environ["SPT_NOENV"] = "1"
getproctitle()


class Attempt:
    """An attempt whose ranks run a function of this file, and its client."""

    def __init__(self, folder: Path, run: Callable[[int], object], **values: Any) -> None:
        files = {"attempt": "", "journal": f"{folder}/journal", "log": f"{folder}/log"}
        given = {"name": "test", **files, "folder": str(folder), "variables": {}, **values}
        request = MindRequest(**given)
        self.client, theirs = socket.socketpair()
        self.minder = os.fork()
        if self.minder == 0:
            self.client.close()
            mind(request, lambda rank: (run(rank), None)[1], theirs)
        theirs.close()
        self._lines = self.client.makefile()
        first = json.loads(self._lines.readline())
        assert first["minder"] == self.minder
        self.ranks: list[int] = first["ranks"]

    def exits(self) -> RankExits | None:
        """Return how the ranks ended, or None if the minder died first."""
        line = self._lines.readline()
        os.waitpid(self.minder, 0)
        return RankExits(**json.loads(line)) if line else None

    def close(self) -> None:
        self._lines.close()
        self.client.close()


Start = Callable[..., Attempt]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start attempts. In the end, none of their processes is left."""
    attempts: list[Attempt] = []
    # Ray, in an earlier test of this process, may have left a handler, which ranks would inherit.
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def start_one(run: Callable[[int], object], ranks: int = 1, **values: Any) -> Attempt:
        attempts.append(Attempt(tmp_path, run, ranks=ranks, **values))
        return attempts[-1]

    yield start_one
    signal.signal(signal.SIGTERM, before)
    for attempt in attempts:
        attempt.close()
        with suppress(ChildProcessError):
            os.waitpid(attempt.minder, 0)
    assert wait_until_dead(read_pids(tmp_path)) == []


def read_pids(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in folder.glob("*.pid")]


def wait_until_dead(pids: list[int]) -> list[int]:
    """Return the processes that still run after five seconds."""
    deadline = time.monotonic() + 5
    while (alive := [pid for pid in pids if _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return alive


def _runs(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def hang(rank: int) -> None:
    Path(f"rank-{rank}.pid").write_text(str(os.getpid()))
    time.sleep(SLEEP_S)


def leave_daemon(rank: int) -> None:
    """Start a process in another session, whose parent is dead, and wait for it to run."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            Path(f"daemon-{rank}.partial").write_text(str(os.getpid()))
            Path(f"daemon-{rank}.partial").rename(f"daemon-{rank}.pid")
            time.sleep(SLEEP_S)
        os._exit(0)
    while not Path(f"daemon-{rank}.pid").exists():
        time.sleep(0.01)


def wait_for_ranks(folder: Path, ranks: int) -> None:
    while len(list(folder.glob("rank-*.pid"))) < ranks:
        time.sleep(0.01)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_ranks_that_end_well(start: Start, ranks: int) -> None:
    assert start(lambda rank: None, ranks).exits() == RankExits([0] * ranks)


def test_a_rank_that_fails_ends_the_others(start: Start) -> None:
    attempt = start(lambda rank: os._exit(3) if rank else hang(rank), ranks=2)
    assert attempt.exits() == RankExits([KILLED, 3], failed=[1])


def test_what_ranks_print_is_in_the_log(start: Start, tmp_path: Path) -> None:
    attempt = start(lambda rank: os.write(1 + rank, b"printed\n"), ranks=2)
    assert attempt.exits() == RankExits([0, 0])
    assert [(tmp_path / name).read_text() for name in ("log", "log_1")] == ["printed\n"] * 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_is_killed_ends_the_others(start: Start, tmp_path: Path, number: int) -> None:
    attempt = start(hang, ranks=3)
    wait_for_ranks(tmp_path, 3)
    os.kill(attempt.ranks[1], number)
    assert attempt.exits() == RankExits([KILLED, -number, KILLED], failed=[1])


def test_a_daemon_does_not_outlive_its_attempt(start: Start) -> None:
    assert start(leave_daemon, ranks=2).exits() == RankExits([0, 0])


def test_a_stopped_rank_ends_at_the_time_limit(start: Start) -> None:
    def stop(rank: int) -> None:
        leave_daemon(rank)
        os.kill(os.getpid(), signal.SIGSTOP)

    attempt = start(stop, ranks=2, preparation_s=1.0)
    expected = RankExits([KILLED, KILLED], late="ready to begin", limit_s=1.0)
    assert attempt.exits() == expected


def test_a_rank_that_is_stopped_for_a_while_goes_on(start: Start, tmp_path: Path) -> None:
    def work(rank: int) -> None:
        Path(f"rank-{rank}.pid").write_text(str(os.getpid()))
        time.sleep(1.0)

    attempt = start(work, ranks=2)
    wait_for_ranks(tmp_path, 2)
    for pid in (attempt.ranks[0], attempt.minder):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(1.5)
    for pid in (attempt.ranks[0], attempt.minder):
        os.kill(pid, signal.SIGCONT)
    assert attempt.exits() == RankExits([0, 0])


def test_the_limit_of_the_task_counts_from_its_begin(start: Start) -> None:
    def begin(rank: int) -> None:
        Path("journal").write_text('{"time": 1.0, "stage": "build"}\n')
        time.sleep(SLEEP_S)

    attempt = start(begin, preparation_s=60.0, timeout_s=0.5)
    assert attempt.exits() == RankExits([KILLED], late="done", limit_s=0.5)


def test_a_late_rank_prints_its_stack(start: Start, tmp_path: Path) -> None:
    def hang_here(rank: int) -> None:
        faulthandler.register(STACK_SIGNAL, file=2, chain=True)
        time.sleep(SLEEP_S)

    attempt = start(hang_here, preparation_s=0.5)
    assert attempt.exits() == RankExits([KILLED], late="ready to begin", limit_s=0.5)
    assert "in hang_here" in (tmp_path / "log").read_text()


def test_a_rank_that_crashes_while_it_prints_its_stack_is_late(start: Start) -> None:
    def crash(rank: int) -> None:
        signal.signal(STACK_SIGNAL, lambda *_: os._exit(3))
        time.sleep(SLEEP_S)

    attempt = start(crash, preparation_s=0.5)
    assert attempt.exits() == RankExits([KILLED], late="ready to begin", limit_s=0.5)


def test_memory_beyond_the_limit_ends_the_attempt(start: Start) -> None:
    def fill(rank: int) -> None:
        content = bytearray(os.urandom(1)) * (600 * 2**20)
        time.sleep(SLEEP_S * len(content))

    exits = start(fill, host_memory_gib=0.5).exits()
    assert exits is not None
    assert exits.codes == [KILLED]
    assert exits.over_memory_bytes is not None
    assert exits.over_memory_bytes > 2**29


def test_everything_ends_with_the_client(start: Start, tmp_path: Path) -> None:
    def run(rank: int) -> None:
        leave_daemon(rank)
        hang(rank)

    attempt = start(run, ranks=2)
    wait_for_ranks(tmp_path, 2)
    attempt.close()
    assert wait_until_dead([attempt.minder, *attempt.ranks, *read_pids(tmp_path)]) == []


def test_ranks_do_not_outlive_a_minder_that_is_killed(start: Start, tmp_path: Path) -> None:
    attempt = start(hang, ranks=2)
    wait_for_ranks(tmp_path, 2)
    os.kill(attempt.minder, signal.SIGKILL)
    assert attempt.exits() is None
    assert wait_until_dead(attempt.ranks) == []


def test_a_rank_has_no_child_to_wait_for(start: Start) -> None:
    """A model may call os.wait(), which must not return for a process of ours."""

    def wait(rank: int) -> None:
        with suppress(ChildProcessError):
            os.wait()
            os._exit(9)

    assert start(wait).exits() == RankExits([0])


def test_processes_have_names(start: Start, tmp_path: Path) -> None:
    attempt = start(hang, ranks=2)
    wait_for_ranks(tmp_path, 2)
    titles = [psutil.Process(pid).cmdline()[0] for pid in (attempt.minder, *attempt.ranks)]
    assert titles == [
        "sweep: minder of cell test",
        "sweep: cell test rank 0",
        "sweep: cell test rank 1",
    ]


def test_a_command_is_the_only_rank(start: Start, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import os; print(os.environ['X']); raise SystemExit(4)"]
    attempt = start(hang, command=command, variables={"X": "of the request"})
    assert attempt.exits() == RankExits([4], failed=[0])
    assert (tmp_path / "log").read_text() == "of the request\n"


def gloo_group(rank: int, ranks: int, file: Path) -> Any:
    import torch.distributed as dist

    store = dist.FileStore(str(file), ranks)  # a port could be taken by then
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=SLEEP_S)
    )
    return dist


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("", RankExits([0, 0])),
        ("fails", RankExits([KILLED, 5], failed=[1])),
        ("is killed", RankExits([KILLED, KILLED], failed=[1])),
        ("hangs", RankExits([KILLED, KILLED], late="ready to begin", limit_s=8.0)),
    ],
)
def test_two_ranks_of_gloo_end_together(
    start: Start, tmp_path: Path, fault: str, expected: RankExits
) -> None:
    """The other rank waits in a collective that never ends."""
    import torch

    def run(rank: int) -> None:
        dist = gloo_group(rank, 2, tmp_path / "store")
        total = torch.full((4,), float(rank + 1))
        dist.all_reduce(total)
        assert total.tolist() == [3.0] * 4
        if rank == 1 and fault == "fails":
            os._exit(5)
        if rank == 1 and fault == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and fault == "hangs":
            time.sleep(SLEEP_S)
        dist.all_reduce(total)
        dist.destroy_process_group()

    attempt = start(run, ranks=2, preparation_s=8.0)
    exits = attempt.exits()
    if fault in ("fails", "is killed"):
        # Rank 0 may notice the closed connection before the minder has killed it.
        assert exits is not None
        assert 1 in exits.failed or exits.codes[0] == 1
        assert exits.codes[1] == expected.codes[1]
    else:
        assert exits == expected
    assert wait_until_dead(attempt.ranks) == []


def test_an_attempt_that_removes_its_files_ends_with_its_limits(
    start: Start, tmp_path: Path
) -> None:
    def remove(rank: int) -> None:
        (tmp_path / "log").unlink()
        (tmp_path / "log").mkdir()
        (tmp_path / "journal").mkdir()
        time.sleep(SLEEP_S)

    exits = start(remove, preparation_s=1.0).exits()
    assert exits == RankExits([KILLED], late="ready to begin", limit_s=1.0)
