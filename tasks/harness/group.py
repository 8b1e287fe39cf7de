"""The group of ranks that measure one cell together: how a rank finds the others and waits for them.

A rank is a process. Its variables are those of torchrun, so that torchrun, too, can run a cell.
Once the group has met, nothing here uses a GPU: ranks wait for each other, and agree on the number of
steps, at the store of the rendezvous. The store itself limits no wait, because it is in the process
of rank 0, which may be the one that hangs: the minder sees in the pages of the ranks which ones wait.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from tasks.process.minder import LISTENER
from tasks.process.phase_file import Progress, waiting_page
from tasks.spec.axes import Values
from tasks.spec.parameters import Params

T = TypeVar("T")
# Until the warm-up has ended, each rank compiles and loads kernels at its own pace.
_BEFORE_TIMING = timedelta(seconds=300)
# By the value of the axis `nccl_algo`. NCCL reads them when the group begins.
NCCL_VARIABLES = {
    "ring": {"NCCL_ALGO": "Ring"},
    "tree": {"NCCL_ALGO": "Tree"},
    "no_nvls": {"NCCL_NVLS_ENABLE": "0"},
}


@dataclass
class Group:
    """The ranks of a cell, as one of them sees them.

    store: None if there is one rank.
    limit_s: how long this rank waits for the others at one place.
    """

    rank: int = 0
    ranks: int = 1
    store: Store | None = None
    progress: Progress = field(default_factory=Progress)
    limit_s: float = _BEFORE_TIMING.total_seconds()

    def agree(self, name: str, value: T) -> T:
        """Return the value of rank 0, which JSON can hold. Name: unique in the attempt."""
        if self.store is None:
            return value
        if self.rank == 0:
            self.store.set(name, json.dumps(value))
        with self.progress.waiting(name, self.limit_s):
            agreed: T = json.loads(self.store.get(name))
        return agreed

    def gather(self, name: str, value: T) -> list[T]:
        """Return the values of all ranks, which JSON can hold. Name: unique in the attempt."""
        if self.store is None:
            return [value]
        self.store.set(f"{name} {self.rank}", json.dumps(value))
        with self.progress.waiting(name, self.limit_s):
            return [json.loads(self.store.get(f"{name} {rank}")) for rank in range(self.ranks)]

    def wait_for_all(self, place: str) -> None:
        """Wait until all ranks are at this place, which is unique in the attempt."""
        if self.store is None:
            return
        with self.progress.waiting(place, self.limit_s):
            if self.store.add(place, 1) == self.ranks:
                self.store.set(f"{place} all", "")
            self.store.wait([f"{place} all"])

    def leave(self) -> None:
        """Return when this process may end: rank 0, which serves the store, as the last one."""
        if self.store is None:
            return
        # What is left for this process to do is to end its journal, so that it stays marked as waiting.
        self.progress.phase = waiting_page("the end of the others", self.limit_s)
        self.store.add("left", 1)
        while self.rank == 0 and self.store.add("left", 0) < self.ranks:
            time.sleep(0.001)

    def limit_collectives(self, seconds: float) -> None:
        """Have nothing wait longer for a rank that does not arrive: no collective, nor another place."""
        self.limit_s = seconds
        if self.store is not None:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))


def join_group(params: Params, progress: Progress) -> tuple[Group, Values]:
    """Wait for the other ranks of a cell. Return the group, and facts about how it met.

    The rank's GPU becomes the current one, and a first collective has run. Raise RuntimeError if
    the number of processes that were started is not that of the ranks.
    """
    began = time.perf_counter()
    rank, started = int(os.environ.get("RANK", "0")), os.environ.get("WORLD_SIZE", "1")
    if int(started) != params.ranks:
        raise RuntimeError(
            f"this cell has {params.ranks} ranks, and {started} was started: use torchrun "
            f"--nproc-per-node {params.ranks} -m tasks"
        )
    os.environ.update(NCCL_VARIABLES.get(str(params.values().get("nccl_algo")), {}))
    on_gpu, free = params.device == "cuda", 0
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
        free = torch.cuda.mem_get_info()[0]
    store = _meet(rank, params.ranks)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=params.ranks,
        timeout=_BEFORE_TIMING,
        device_id=torch.device("cuda", torch.cuda.current_device()) if on_gpu else None,
    )
    dist.all_reduce(torch.ones(1, device=params.device))
    facts: Values = {"rendezvous_s": time.perf_counter() - began, "ranks": params.ranks}
    if on_gpu:
        torch.cuda.synchronize()
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        facts["nccl"] = ".".join(map(str, version))
        taken = free - torch.cuda.mem_get_info()[0]
        # Unknown if another process has freed memory of this GPU at the same time.
        facts["nccl_device_bytes"] = taken if taken > 0 else None
    # Whoever waits there is ended with the rank that fails, or by the limit of the attempt.
    store.set_timeout(timedelta(days=1))
    return Group(rank, params.ranks, PrefixStore("sweep", store), progress), facts


def _meet(rank: int, ranks: int) -> Store:
    """Return the store of the rendezvous, which rank 0 serves, or the agent of torchrun."""
    listener = os.environ.pop(LISTENER, None)
    served_elsewhere = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        ranks,
        is_master=rank == 0 and not served_elsewhere,
        timeout=_BEFORE_TIMING,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else int(listener),
    )
