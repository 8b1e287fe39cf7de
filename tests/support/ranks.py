"""Ranks on the CPU: processes in one gloo group that run functions of tests.

They are forked from a server that has imported torch once for the whole test run, and that has never
run a backward pass, which would break the autograd of its children.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 120.0  # for one call, of ranks that share two busy cores
_PRELOADED = [
    "pytest", "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.optim",
    "tasks.harness.setup", "tasks.training.checkpointing", "tasks.training.model_sources",
    "tests.support.rank_steps", "tests.support.ranks",
]  # fmt: skip


def often(names: Iterable[str], *usual: str) -> list[Any]:
    """Return parameters of a test, of which the default tier runs the usual ones alone."""
    return [one if one in usual else pytest.param(one, marks=pytest.mark.slow) for one in names]


class RankError(Exception):
    """A function failed on a rank, or a rank did not answer in time."""


class Ranks:
    """A group of `count` ranks, which starts with the first call and ends with `close`.

    `ranks(function, ...)` runs a function of a module on each rank, and returns what it returned on
    each. After a failure the group is killed, and the next call starts another one.
    """

    def __init__(self, count: int, limit_s: float = LIMIT_S) -> None:
        self.count = count
        self.limit_s = limit_s
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, arguments))
        answers: dict[int, Any] = {}
        while len(answers) < self.count:
            missing = [one for rank, one in enumerate(self._connections) if rank not in answers]
            ready = wait(missing, self.limit_s)
            if not ready:
                self.close()
                raise RankError(f"ranks without an answer after {self.limit_s} s: {answers}")
            for connection in ready:
                rank = self._connections.index(connection)  # type: ignore[arg-type]
                try:
                    is_ok, answers[rank] = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    is_ok, answers[rank] = False, "it ended"
                if not is_ok:
                    self.close()
                    raise RankError(f"rank {rank}: {answers[rank]}")
        return [answers[rank] for rank in range(self.count)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        store = Path(tempfile.mkdtemp(prefix="ranks-")) / "store"
        for rank in range(self.count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.count, str(store), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)


def _serve(rank: int, count: int, store: str, connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, count),
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=300),
    )
    while True:
        try:
            function, arguments = connection.recv()
        except (EOFError, ConnectionError):
            os._exit(0)
        try:
            answer = True, function(*arguments)
        except BaseException:
            answer = False, traceback.format_exc()
        connection.send(answer)
