"""The flight record of a rank: the collectives that it has called, as torch's flight recorder has them.

A rank writes it when it fails, and when the minder asks because another one has failed.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# The main thread writes the record when it fails, and another thread when it answers the minder.
_WRITING = threading.RLock()


def answer_signal(number: int, file: Path) -> None:
    """Have a thread answer a signal, by the flight record and all stacks, and end this process.

    It answers while the main thread waits in a collective, where no handler of Python runs. Call
    this before there is another thread.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})

    def answer() -> None:
        signal.sigwait({number})
        _WRITING.acquire()  # never released: this process ends while no record is half written
        record_flight(file)
        faulthandler.dump_traceback(all_threads=True)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=answer, daemon=True).start()


def record_flight(file: Path) -> None:
    """Write which collectives this rank has called. There is no file before the group has met."""
    with suppress(Exception), _WRITING:  # nothing else must fail with it
        from torch._C import _distributed_c10d as recorder

        # Each backend has its record: the first one is gloo's. Without calls it is the shorter one.
        names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
        dumps = [getattr(recorder, name)(True, False) for name in names if hasattr(recorder, name)]
        file.write_bytes(max(dumps, key=len))


@dataclass(frozen=True)
class Collective:
    """A collective that a rank has called.

    number: of the calls of its kind of operation, from 1. shape: sizes and dtypes of its inputs.
    """

    number: int
    name: str
    shape: str


def last_collective(file: Path) -> Collective | None:
    """Return the latest collective of a flight record; None without a record that can be read."""
    try:
        entry = json.loads(file.read_bytes())["entries"][-1]
        name = str(entry["profiling_name"]).removeprefix("gloo:").removeprefix("nccl:")
        shape = f"{entry['input_sizes']} {entry['input_dtypes']}"
        return Collective(int(entry["collective_seq_id"]), name, shape)
    except (OSError, LookupError, TypeError, ValueError, RecursionError):
        return None
