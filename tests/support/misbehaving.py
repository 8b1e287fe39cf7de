"""Models of one's own: one that dies in every way there is, named in a config as `misbehaving:Model`, and one that hides."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Unspeakable(Exception):
    """Neither pickles nor prints."""

    def __init__(self, a: int, b: int) -> None:
        self.lock = (a, b, lambda: None)

    def __str__(self) -> str:
        return "unspeakable \ud800 \x00 text"


class Speechless(RuntimeError):
    """Fails where it is asked what it says."""

    def __str__(self) -> str:
        raise ValueError("no words")

    __repr__ = __str__


def refuse() -> nn.Module:
    raise ValueError(
        f"the compiler is {'there' if 'torch._inductor.compile_fx' in sys.modules else 'not there'}"
    )


class Model(nn.Module):
    """From token ids to logits, and on the way `how`. `step` counts from 0: the earlier ones go well.

    where: or already in the build, or not before backward or optimizer. mark: a file to which a line is added as each process
    is built, and its process id. once: in the first of those alone. victim: what is removed. rank: the one that misbehaves.
    """

    def __init__(
        self,
        how: str = "well",
        step: int = 0,
        mark: str | None = None,
        vocab_size: int = 10_000,
        where: str = "forward",
        once: bool = False,
        victim: str = "",
        rank: int | None = None,
    ) -> None:
        super().__init__()
        self.where, self.mark, self.victim = where, mark, victim
        is_culprit = rank is None or rank == int(os.environ["RANK"])
        self.how, self.left = how if is_culprit else "well", step
        self.embedding = nn.Embedding(vocab_size, 8)
        self.head = nn.Linear(8, vocab_size)
        if mark:
            with Path(mark).open("a") as file:
                file.write(f"{os.getpid()}\n")
            if once and len(Path(mark).read_text().splitlines()) > 1:
                self.how = "well"
        if where == "build":
            self.misbehave()
        if where == "optimizer":
            register_optimizer_step_pre_hook(lambda *_: self.misbehave())

    def forward(self, tokens: Tensor) -> Tensor:
        if self.where == "forward":
            self.misbehave()
        logits = self.head(self.embedding(tokens))
        if self.where == "backward":
            logits.register_hook(lambda _: self.misbehave())
        return logits

    def misbehave(self) -> None:
        if self.left == 0:
            getattr(self, self.how)()
        self.left -= 1

    def well(self) -> None:
        pass

    def out_of_range(self) -> None:
        """A token beyond the rows of the table."""
        rows = self.embedding.num_embeddings
        self.embedding(torch.full((1,), rows, device=self.embedding.weight.device))

    def tell_its_cache(self) -> None:
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        print(f"compiles into {cache_dir()}", flush=True)

    def tell_its_ancestors(self) -> None:
        print("ancestors:", *(process.pid for process in psutil.Process().parents()), flush=True)

    def meet_another(self) -> None:
        """That is measured at the same time."""
        self.tell_its_ancestors()
        while len(Path(str(self.mark)).read_text().splitlines()) < 2:
            time.sleep(0.05)

    def tell_its_score(self) -> None:
        print("goes at", Path("/proc/self/oom_score_adj").read_text(), flush=True)

    def tell_whether_it_trains(self) -> None:
        print(self.training, flush=True)
        self.left += 1

    def multiply_in_tf32(self) -> None:
        torch.set_float32_matmul_precision("high")

    def multiply_in_tf32_by_the_new_interface(self) -> None:
        torch.backends.cuda.matmul.fp32_precision = "tf32"

    def convolve_in_tf32(self) -> None:
        torch.backends.cudnn.allow_tf32 = True

    def slowly(self) -> None:
        time.sleep(0.1)
        self.left += 1

    def sigkill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def sigrt(self) -> None:
        """One of those that have no name of their own."""
        os.kill(os.getpid(), signal.SIGRTMIN + 6)

    def kill_its_parent(self) -> None:
        """That it was forked from."""
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)

    def segfault(self) -> None:
        ctypes.string_at(0)

    def abort(self) -> None:
        os.abort()

    def leave(self) -> None:
        os._exit(7)

    def leave_well(self) -> None:
        os._exit(0)

    def sys_exit(self) -> None:
        sys.exit(3)

    def sys_exit_well(self) -> None:
        sys.exit(0)

    def fail(self) -> None:
        print("a last line on stdout")
        raise ValueError("wrong on purpose")

    def unspeakable(self) -> None:
        raise Unspeakable(1, 2)

    def speechless(self) -> None:
        raise Speechless

    def flood(self) -> None:
        print("the first line", flush=True)
        for _ in range(1024):
            os.write(1, b"flood\n" * (1024**2 // 6))
        print("the last line", flush=True)

    def jump_the_clock(self) -> None:
        """Back by a year, and from then on."""
        now = time.time
        time.time = lambda: now() - 365 * 86400

    def remove(self) -> None:
        shutil.rmtree(self.victim)

    def sleep(self) -> None:
        time.sleep(1000)

    def spin_in_c(self) -> None:
        ctypes.PyDLL(None).sleep(1000)  # holds the interpreter's lock: no Python thread runs

    def stop_itself(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def with_grandchild(self) -> None:
        Path("grandchild.pid").write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
        time.sleep(1000)

    def leave_a_daemon(self) -> None:
        """In a session of its own, which the end of the cell's process group does not end."""
        Path("grandchild.pid").write_text(
            str(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
        )

    def leave_a_daemon_and_crash(self) -> None:
        self.leave_a_daemon()
        os.abort()

    def with_daemon(self) -> None:
        self.leave_a_daemon()
        time.sleep(1000)

    def python_refuses(self) -> None:
        raise MemoryError

    def cuda_oom(self) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has a total capacity of 31.84 GiB"
        )

    def fill(self) -> None:
        """The device's memory, until it or the cap on it refuses."""
        self.held = []
        while True:
            self.held.append(
                torch.empty(256 * 1024**2, dtype=torch.uint8, device=self.head.weight.device)
            )

    def write_far_away(self) -> None:
        """Where the GPU has no memory of ours."""
        from illegal import write_far_away

        write_far_away[(1,)](self.head.weight)

    def alloc(self) -> None:
        torch.ones(8, 1024**3 // 8, dtype=torch.float64)  # 8 GiB at once

    def grow(self) -> None:
        held = []
        while True:
            held.append(bytearray(b"x" * 50_000_000))
            time.sleep(0.05)


class Hoarder(Model):
    """Holds memory that is no parameter, no buffer, and no part of any step."""

    def __init__(self, hidden_bytes: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hidden = torch.empty(hidden_bytes, dtype=torch.uint8)
