"""The course's Transformer with a slow-down: SLOW=5 in the environment adds 5 % to its time.

The gate must find it (docs/how-to/use-in-ci.md). On a GPU, a kernel that only waits is added to each
forward pass: SLOW percent of `kernel_ms`, the time of all kernels of a step of that cell. On a CPU
the thread is busy after each forward pass for SLOW percent of its time, so use `pass: forward`.

As a program it prints the config that has this model instead of the cells of a run, each with the
kernel time that the run measured:

    sweep ab configs/gate.yaml --a env=A=1 --b env=A=2 --out results/aa
    python benchmarks/slow_model.py results/aa/a > benchmarks/slow.yaml
    sweep ab benchmarks/slow.yaml --a env=SLOW=0 --b env=SLOW=5 --out results/slow
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
from torch import Tensor

from model.config import SIZES, VOCAB_SIZE
from model.transformer import TransformerLM

_CUDA: Any = torch.cuda  # torch has no types for these functions
_GUESSED_CYCLES_PER_MS = 1.5e6  # until a pause was timed
# The first pause has at least this length, and only such pauses are timed: the time includes the
# launch, which takes 20 to 60 µs.
_TIMED_MS = 10.0


class SlowTransformer(TransformerLM):
    def __init__(
        self,
        size: str,
        context_length: int,
        kernel_ms: float | None = None,
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        super().__init__(SIZES[2025][size], context_length, vocab_size)
        self._share = float(os.environ.get("SLOW", "0")) / 100
        self._kernel_ms = kernel_ms
        self._pause = _GpuPause()

    def forward(self, token_ids: Tensor) -> Tensor:
        start = time.perf_counter()
        logits = super().forward(token_ids)
        if not self._share:
            return logits
        if token_ids.device.type != "cuda":
            end = time.perf_counter() * (1 + self._share) - start * self._share
            while time.perf_counter() < end:
                pass
        elif self._kernel_ms is None:
            raise ValueError("on a GPU, the model needs kernel_ms, the kernel time of a step")
        else:
            self._pause(self._kernel_ms * self._share)
        return logits


class _GpuPause:
    """A kernel that waits. An earlier pause shows how many clock cycles a millisecond has."""

    def __init__(self) -> None:
        self._cycles_per_ms: float | None = None
        self._timed: tuple[int, Any, Any] | None = None

    def __call__(self, milliseconds: float) -> None:
        if self._timed is not None and self._timed[2].query():
            cycles, start, end = self._timed
            self._cycles_per_ms = cycles / start.elapsed_time(end)
            self._timed = None
        if self._cycles_per_ms is None and self._timed is None:
            milliseconds = max(milliseconds, _TIMED_MS)
        cycles = round(milliseconds * (self._cycles_per_ms or _GUESSED_CYCLES_PER_MS))
        start, end = (_CUDA.Event(enable_timing=True) for _ in range(2))
        start.record()
        _CUDA._sleep(cycles)
        end.record()
        if self._timed is None and milliseconds >= _TIMED_MS:
            self._timed = cycles, start, end


def slowed_config(*runs: str) -> dict[str, Any]:
    """Return a config of this model with a grid for each cell of these runs."""
    import orchestrator as sweep

    cells = sweep.load(*runs).cells
    grids = []
    for row in cells[cells["step_kernel_time_ms_median"].notna()].to_dict("records"):
        arguments = {name: row[name] for name in ("size", "context_length")}
        names = ("context_length", "pass", "precision", "compile")
        fixed = {name: row[name] for name in names}
        fixed["model"] = "slow_model:SlowTransformer"
        fixed["model_args"] = {**arguments, "kernel_ms": row["step_kernel_time_ms_median"]}
        grids.append({"task": "train_step", "fixed": fixed})
    instruments = ["timing", "memory", "telemetry", "backend", "kernel_time"]
    defaults = {"device": "cuda", "timing": "adaptive"}
    return {"name": "slow", "defaults": defaults, "instruments": instruments, "grids": grids}


def main() -> None:
    # JSON is YAML, too.
    print(json.dumps(slowed_config(*sys.argv[1:]), indent=1))


if __name__ == "__main__":
    main()
