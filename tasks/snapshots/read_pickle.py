"""Read a memory snapshot that another program pickled, without executing anything in it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import NoReturn

from tasks.snapshots.replay import Snapshot


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler of containers, strings and numbers. A pickle of anything else names a function."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not read for safety")


def read_snapshot(path: Path) -> Snapshot:
    """Read a file of `torch.cuda.memory._dump_snapshot`. Raise ValueError if it is not one."""
    try:
        with path.open("rb") as file:
            snapshot: Snapshot = _PlainUnpickler(file).load()
    # A damaged pickle can raise almost any exception.
    except Exception as error:
        raise ValueError(f"{path}: not a memory snapshot: {error}") from error
    if not isinstance(snapshot, dict) or not {"segments", "device_traces"} <= snapshot.keys():
        raise ValueError(f"{path}: not a memory snapshot: it has no segments and device_traces")
    return snapshot
