"""The minder of one attempt: it runs the ranks, and ends everything that they started.

A rank is one process of the cell. The minder is the parent of all ranks and adopts their orphans. In
one loop it waits for the ranks, for the client that asked for the attempt, and for the limits of
time and memory. Whatever ends first (all ranks well, one rank badly, the client, a limit), the rest is
killed in the same way. When nothing of the attempt is left, it sends one `RankExits`.

It is forked by the fork server, and needs Linux. A rank is forked in turn, or is a new process.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

import psutil
from setproctitle import setproctitle

from tasks.process.journal import read_journal
from tasks.process.log_file import free_middle, remove_middle, tail
from tasks.process.phase_file import parse_wait, read_page
from tasks.spec.attempt import BEFORE_ITS_TASK, PHASE_FILE, PREPARATION_S, rank_file

ORPHANS_S = 10.0  # a process that holds a GPU may take seconds to die
# How late an exceeded limit may be noticed. Looking takes time on a core that may be the cell's.
_TICK_S = 0.2
# Has a cell's process print the stacks of its threads and end.
STACK_SIGNAL = signal.SIGUSR2
STACKS_S = 2.0  # writing them takes milliseconds
_KILL_TICK_S = 0.001
# NCCL's watchdog reports a collective when it exceeds its time limit. It ends the process a minute
# later, and never if the rank that serves the store is stopped.
REPORT = r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+)"
REPORT_BYTES = 20_000  # of the end of a log
# Variable of rank 0: descriptor of the socket on which it listens for the other ranks.
LISTENER = "SWEEP_LISTENER"
_HERE = "127.0.0.1"
_GIB = 1024**3
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
_CHILDREN = Path("/proc/thread-self/children")


@dataclass(frozen=True)
class MindRequest:
    """An attempt to run.

    Args:
        name: of the cell, in the titles of the processes.
        journal, log: files that rank 0 writes. The names for other ranks have their numbers.
        folder: their working directory.
        variables: of forked ranks those that are read late; of new processes all of them.
        command: starts a new process as a rank; empty: ranks are forked.
        preparation_s: limit until the task begins.
        timeout_s: limit from the begin of the task.
        host_memory_gib: limit on the resident set of each process.
    """

    name: str
    attempt: str  # file
    journal: str
    log: str
    folder: str
    variables: Mapping[str, str]
    command: Sequence[str] = ()
    ranks: int = 1
    preparation_s: float = PREPARATION_S
    timeout_s: float = 600.0
    host_memory_gib: float | None = None


@dataclass(frozen=True)
class RankExits:
    """The ends of the ranks of an attempt.

    Args:
        codes: exit code by rank; negative for a signal.
        failed: the ranks that ended badly by themselves or waited in vain, as they were noticed.
        late: what the attempt was not after `limit_s`, such as "done"; empty: it was in time.
        missing: the ranks that did not arrive at `place`, where others waited for `limit_s`.
        over_memory_bytes: the resident set that exceeded the limit, that of `over_memory_rank`.
        log_left_out_bytes: what was removed from the middle of the log.
    """

    codes: Sequence[int]
    failed: Sequence[int] = field(default_factory=list)
    late: str = ""
    limit_s: float = 0.0
    missing: Sequence[int] = field(default_factory=list)
    place: str = ""
    over_memory_bytes: int | None = None
    over_memory_rank: int = 0
    log_left_out_bytes: int = 0


Run = Callable[[int], None]  # runs the rank of this number


def send(connection: socket.socket, message: Mapping[str, object]) -> None:
    """Send a message as one line of JSON."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def set_title(title: str) -> None:
    """Name this process in the output of `ps`."""
    # Otherwise the title may be written over the environment, which identifies processes.
    os.environ["SPT_NOENV"] = "1"
    setproctitle(f"sweep: {title}")


def die_with_parent_process() -> None:
    """Have the kernel kill this process when its parent process, a single thread, has died."""
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def become_subreaper() -> None:
    """Make this process the parent of all orphans among its descendants (prctl(2))."""
    # Without /proc this process could not find the orphans to kill them, so init keeps them.
    if _CHILDREN.exists():
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """Return the process ids of this process's children; empty without /proc."""
    try:
        return set(map(int, _CHILDREN.read_text().split()))
    except OSError:
        return set()


def exit_after(work: Callable[[], None]) -> NoReturn:
    """Do a forked child's work and end it, so that it never returns into the parent's code."""
    # _exit, not exit: the handlers of atexit and the buffers of streams are the parent's.
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def mind(request: MindRequest, run: Run, client: socket.socket) -> NoReturn:
    """Run the ranks of an attempt in this process's children. Send their ids, then how they ended.

    Args:
        run: what a forked rank does.
        client: the connection to the process that asked for the attempt.
    """
    os.setsid()
    become_subreaper()
    set_title(f"minder of cell {request.name}")
    minder = Minder(request, client)
    try:
        minder.start_ranks(run)
    except OSError as error:  # no process can be started
        kill_children()
        with suppress(OSError):
            send(client, {"errno": error.errno, "error": error.strerror})
        os._exit(1)
    with suppress(OSError):  # the client may have ended
        send(client, {"minder": os.getpid(), "ranks": minder.pids})
    exits = minder.wait()
    with suppress(OSError):
        send(client, asdict(exits))
    os._exit(0)


@dataclass
class Minder:
    """The ranks of one attempt, as their parent sees them."""

    request: MindRequest
    client: socket.socket
    pids: list[int] = field(default_factory=list)

    def start_ranks(self, run: Run) -> None:
        """Start all ranks. Raises OSError."""
        minder = os.getpid()
        # Bound before there are ranks, so that no other process can take the port.
        meeting = socket.create_server((_HERE, 0)) if self.request.ranks > 1 else None
        with meeting or nullcontext():
            for rank in range(self.request.ranks):
                pid = os.fork()
                if pid == 0:
                    variables = rank_variables(rank, self.request.ranks, meeting)
                    exit_after(partial(self._run_rank, rank, run, minder, variables))
                self.pids.append(pid)

    def _run_rank(self, rank: int, run: Run, minder: int, variables: Mapping[str, str]) -> None:
        """Set up the state that a new process would have started with, then run."""
        os.setpgid(0, 0)
        die_with_parent_process()
        if os.getppid() != minder:  # it died before the line above
            os._exit(1)
        self.client.close()
        request = self.request
        set_title(f"cell {request.name} rank {rank}")
        with open(os.devnull) as nothing, open(rank_file(Path(request.log), rank), "ab") as log:
            os.dup2(nothing.fileno(), 0)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.chdir(request.folder)
        if request.command:
            os.execve(request.command[0], list(request.command), {**request.variables, **variables})
        os.environ.update(variables)
        run(rank)

    def wait(self) -> RankExits:
        """Wait for the first reason to end, end everything, and return how the ranks ended."""
        codes, failed, limits = dict[int, int](), list[int](), AttemptLimits(self.request)
        client = self.client.fileno()
        watched = {os.pidfd_open(pid): pid for pid in self.pids}
        while watched and not failed:
            ready, _, _ = select.select([client, *watched], [], [], _TICK_S)
            if client in ready:  # it never writes, so it has ended
                break
            for descriptor in ready:
                pid = watched.pop(descriptor)
                os.close(descriptor)
                codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                if codes[pid]:
                    failed.append(self.pids.index(pid))
            if not ready and limits.are_exceeded(self.pids, list(codes)):
                break
            if not ready:
                failed += limits.ranks_in_vain()
        if watched and (limits.late or limits.missing or failed):
            print_stacks()
            _wait_for_ends(list(watched))
        kill_children()
        return RankExits(
            codes=[codes.get(pid, -signal.SIGKILL) for pid in self.pids],
            failed=failed,
            late=limits.late,
            limit_s=limits.limit_s,
            missing=limits.missing,
            place=limits.place,
            over_memory_bytes=limits.over_memory_bytes,
            over_memory_rank=limits.over_memory_rank,
            log_left_out_bytes=limits.shorten_log(),
        )


def rank_variables(rank: int, ranks: int, meeting: socket.socket | None) -> dict[str, str]:
    """Return the variables by which a rank finds the others; none without others.

    They are those of torchrun, except for LISTENER.
    """
    if meeting is None:
        return {}
    here, port = meeting.getsockname()
    variables = {"MASTER_ADDR": here, "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": ranks}
    variables |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    if rank == 0:
        meeting.set_inheritable(True)
        variables[LISTENER] = meeting.fileno()
    else:
        meeting.close()
    return {name: str(value) for name, value in variables.items()}


def _wait_for_ends(watched: list[int]) -> None:
    """Wait until the processes of these descriptors have ended, or for STACKS_S."""
    deadline = time.monotonic() + STACKS_S
    while watched and (left := deadline - time.monotonic()) > 0:
        ended, _, _ = select.select(watched, [], [], left)
        watched = [one for one in watched if one not in ended]


def print_stacks() -> None:
    """Have the descendants of this process print where they hang, and end."""
    with suppress(psutil.Error):
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                process.send_signal(STACK_SIGNAL)


def kill_children(spared: set[int] | None = None) -> None:
    """Kill all descendants. Orphans become children of this process, so none escapes.

    Args:
        spared: children that live on, with what they started.
    """
    # A child in uninterruptible sleep, in a driver for example, cannot be killed.
    deadline = time.monotonic() + ORPHANS_S
    while (killed := children() - (spared or set())) and time.monotonic() < deadline:
        for pid in killed:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        # A killed process hands its own children to this one, so look again.
        time.sleep(_KILL_TICK_S)


class AttemptLimits:
    """The time and the memory that an attempt may take, and the space of its log.

    The other attributes are those of RankExits. left_out_bytes: removed from the log so far.
    """

    def __init__(self, request: MindRequest) -> None:
        self.late, self.limit_s = "", 0.0
        self.missing, self.place = list[int](), ""
        self.over_memory_bytes: int | None = None
        self.over_memory_rank = 0
        self.left_out_bytes = 0
        self._logs = [rank_file(Path(request.log), rank) for rank in range(request.ranks)]
        self._request = request
        # How long importing torch takes depends on the file system and on what else starts, not on
        # the cell. Its own limit counts from the start of its task.
        self._deadline = time.monotonic() + request.preparation_s
        self._has_begun = False
        page = Path(request.journal).with_name(PHASE_FILE)
        self._page_files = [rank_file(page, rank) for rank in range(request.ranks)]
        self._pages, self._unchanged_since = list[str](), time.monotonic()

    def are_exceeded(self, pids: Sequence[int], ended: Sequence[int] = ()) -> bool:
        """Return True if a limit is exceeded by the process trees of these ranks.

        Args:
            ended: those of them that have ended well.
        """
        # A cell may remove its own files, and must end with its limits all the same.
        for log in self._logs:
            with suppress(OSError):
                self.left_out_bytes += free_middle(log)
        with suppress(OSError):
            self._look_for_begin()
        if time.monotonic() > self._deadline:
            request = self._request
            self.late = "done" if self._has_begun else "ready to begin"
            self.limit_s = request.timeout_s if self._has_begun else request.preparation_s
            return True
        limit_gib = self._request.host_memory_gib
        if limit_gib is not None:
            # Forked processes share pages, so the largest process counts, and not the sum.
            sizes = list(map(_largest_resident_set, pids))
            if max(sizes) > limit_gib * _GIB:
                self.over_memory_bytes = max(sizes)
                self.over_memory_rank = sizes.index(max(sizes))
        if len(pids) > 1:
            self._look_for_missing([pids.index(pid) for pid in ended])
        return self.over_memory_bytes is not None or bool(self.missing)

    def _look_for_missing(self, ended: Collection[int]) -> None:
        """Find the ranks for which others wait while nothing changes on any rank."""
        try:
            pages = list(map(read_page, self._page_files))
        except OSError:
            return
        if pages != self._pages:
            self._pages, self._unchanged_since = pages, time.monotonic()
            return
        waits = {rank: wait for rank, page in enumerate(pages) if (wait := parse_wait(page))}
        if not waits:  # but, if for anything, for a collective, which torch limits
            return
        limit_s, place = min(waits.values())
        if time.monotonic() - self._unchanged_since > limit_s:
            self.limit_s, self.place = limit_s, place
            running = [rank for rank in range(len(pages)) if rank not in ended]
            self.missing = [rank for rank in running if rank not in waits] or running

    def ranks_in_vain(self) -> list[int]:
        """Return the ranks at whose collective another one has not arrived in time, by NCCL."""
        found = []
        for rank, log in enumerate(self._logs if len(self._logs) > 1 else []):
            with suppress(OSError):
                if re.search(REPORT, tail(log, REPORT_BYTES)):
                    found.append(rank)
        return found

    def shorten_log(self) -> int:
        """Remove the middle of long logs. Return how many bytes were removed in all."""
        for log in self._logs:
            with suppress(OSError):
                self.left_out_bytes += remove_middle(log)
        return self.left_out_bytes

    def _look_for_begin(self) -> None:
        if self._has_begun:
            return
        if read_journal(Path(self._request.journal)).stage not in BEFORE_ITS_TASK:
            self._has_begun = True
            self._deadline = time.monotonic() + self._request.timeout_s


def _largest_resident_set(pid: int) -> int:
    """Return the resident set in bytes of the largest process among a rank and its descendants."""
    largest = 0
    with suppress(psutil.Error):  # it may have ended since
        rank = psutil.Process(pid)
        for process in (rank, *rank.children(recursive=True)):
            with suppress(psutil.Error):
                largest = max(largest, process.memory_info().rss)
    return largest
