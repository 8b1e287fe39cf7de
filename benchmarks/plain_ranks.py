"""Comparison of `sweep` with plain loops of torch.distributed: do both report the same times?

    sweep run configs/collectives.yaml --set gpus=2 --out results/c2
    sweep run configs/parallel.yaml --set gpus=2 --where 'parallel=ddp|fsdp2' --out results/p2
    torchrun --nproc-per-node 2 benchmarks/plain_ranks.py results/c2 results/p2

The plain loops use nothing of this project but the model. They repeat each cell of these runs that
has as many ranks: a collective, or a training step with DDP or FSDP2. A step is as long as on its
slowest rank. Rank 0 prints the medians and their ratio. A cell agrees within 2 %, a collective within
5 %, and one of less than 10 MB within 10 %, or if the intervals of the medians overlap. Exit code 1
if one does not agree.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.distributed import P2POp
from torch.nn import functional

from model.attention import make_attention
from model.config import SIZES
from model.optimizer import OPTIMIZERS
from model.transformer import TransformerLM
from orchestrator import api
from tasks.spec.order_statistics import median_rank

WIDTHS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WARM_UP, STEPS = 5, 20
Step = Callable[[], None]


def main() -> None:
    """Measure in plain loops what the runs have measured, and compare."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rows, disagreeing = [], 0
    for folder in sys.argv[1:]:
        cells = api.load(folder).cells
        measured: Any = cells[cells["status"] == "ok"].to_dict("records")
        for cell in measured:
            ranks = cell["gpus"] if cell["device"] == "cuda" else cell["processes"]
            is_step = cell["task"] == "train_step"
            is_other = is_step and cell["parallel"] not in ("ddp", "fsdp2")
            if ranks != dist.get_world_size() or cell["device"] != device or is_other:
                continue
            plain = time_steps(training(cell) if is_step else collective(cell), device)
            tolerance = 0.02 if is_step else (0.05 if cell["size_mb"] >= 10 else 0.1)
            rank = median_rank(len(plain))
            low, high = sorted(plain)[rank - 1], sorted(plain)[-rank]
            ratio = statistics.median(plain) / cell["step_ms_median"]
            overlaps = low <= cell["step_ms_ci_high"] and cell["step_ms_ci_low"] <= high
            agrees = abs(ratio - 1) <= tolerance or overlaps
            disagreeing += not agrees
            what = ("size", "parallel") if is_step else ("collective", "size_mb", "dtype", "call")
            name = " ".join(str(cell[axis]) for axis in what if axis in cell)
            rows.append((name, cell["step_ms_median"], statistics.median(plain), ratio, agrees))
            if dist.get_rank() == 0:
                print(*rows[-1], flush=True)
    if dist.get_rank() == 0:
        print(
            tabulate(
                rows, ("cell", "sweep ms", "plain ms", "plain / sweep", "agrees"), floatfmt=".3f"
            )
        )
    dist.destroy_process_group()
    sys.exit(bool(disagreeing))


def time_steps(step: Step, device: str) -> list[float]:
    """Return the ms of each step on the slowest rank, without waiting between steps on a GPU."""
    for _ in range(WARM_UP):
        step()
    if device == "cuda":
        marks = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(STEPS + 1)
        ]
        dist.barrier()
        torch.cuda.synchronize()
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
        torch.cuda.synchronize()
        ms = [one.elapsed_time(other) for one, other in pairwise(marks)]
    else:
        ms = []
        for _ in range(STEPS):
            begin = time.perf_counter()
            step()
            ms.append((time.perf_counter() - begin) * 1e3)
    slowest = torch.tensor(ms, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [float(one) for one in slowest]


def collective(cell: Mapping[str, Any]) -> Step:
    """Return a call of the cell's collective, or 20 of them that are then waited for."""
    ranks, peer, dtype = dist.get_world_size(), dist.get_rank() ^ 1, WIDTHS[cell["dtype"]]
    part = max(1, int(cell["size_mb"] * 1e6) // dtype.itemsize // ranks)
    whole = torch.ones(part * ranks, dtype=dtype, device=cell["device"])
    share, other = whole[:part].clone(), whole.clone()

    def exchange(**_: bool) -> None:
        swapped = [P2POp(dist.isend, whole, peer), P2POp(dist.irecv, other, peer)]
        for work in dist.batch_isend_irecv(swapped):
            work.wait()

    calls: dict[str, Callable[..., Any]] = {
        "all_reduce": lambda **how: dist.all_reduce(whole, **how),
        "all_gather": lambda **how: dist.all_gather_into_tensor(whole, share, **how),
        "reduce_scatter": lambda **how: dist.reduce_scatter_tensor(share, whole, **how),
        "broadcast": lambda **how: dist.broadcast(whole, 0, **how),
        "all_to_all": lambda **how: dist.all_to_all_single(other, whole, **how),
        "send_recv": exchange,
    }
    call, calls_of_step = calls[cell["collective"]], int(cell["collective_calls"])

    def step() -> None:
        if cell["call"] == "sync":
            for _ in range(calls_of_step):
                call()
            return
        for work in [call(async_op=True) for _ in range(calls_of_step)]:
            work.wait()

    return step


def training(cell: Mapping[str, Any]) -> Step:
    """Return a step with DDP or FSDP2, as their tutorials write it."""
    device, bf16 = cell["device"], cell["precision"] == "bf16"
    torch.manual_seed(0)
    with torch.device(device):
        dims, length = SIZES[cell["year"]][cell["size"]], cell["context_length"]
        attend = make_attention(cell["attention"], length, True, torch.device(device))
        model: Any = TransformerLM(dims, length, cell["vocab_size"], attend)
        rows = cell["batch_size"] // (1 if cell["batch"] == "per_gpu" else dist.get_world_size())
        x, y = torch.randint(cell["vocab_size"], (2, rows, cell["context_length"]))
    if cell["parallel"] == "fsdp2":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = (
            MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
        )
        for block in model.layers:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        bf16 = False
    else:
        model = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = OPTIMIZERS[cell["optimizer"]](model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            loss = functional.cross_entropy(model(x).view(-1, cell["vocab_size"]), y.view(-1))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


if __name__ == "__main__":
    main()
