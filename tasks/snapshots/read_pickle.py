"""Read a memory snapshot that another program pickled, without executing anything in it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from tasks.snapshots.replay import Snapshot


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler of containers, strings and numbers. A pickle of anything else names a function."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not read for safety")


# What is read from each kind of record, with its types. A pickle can hold one object in many places:
# a text of a gigabyte in each event, or a pair of a pair of a pair, whose hash takes for ever.
_Types = tuple[type, ...]
_TEXT: _Types = (str,)
_NUMBER: _Types = (int, float)
_EVENT = {
    "action": _TEXT, "addr": _NUMBER, "size": _NUMBER, "time_us": _NUMBER, "user_metadata": _TEXT,
}  # fmt: skip
_BLOCK = {"address": _NUMBER, "size": _NUMBER, "requested_size": _NUMBER, "state": _TEXT}
_ANNOTATION = {"name": _TEXT, "stage": _TEXT, "time_us": _NUMBER, "device": _NUMBER}
_FRAME = {"filename": _TEXT, "line": _NUMBER, "name": _TEXT}
_LONGEST_TEXT, _MOST_FRAMES = 10_000, 1000


def read_snapshot(path: Path) -> Snapshot:
    """Read a file of `torch.cuda.memory._dump_snapshot`. Raise ValueError if it is not one."""
    try:
        with path.open("rb") as file:
            snapshot: Snapshot = _PlainUnpickler(file).load()
        if not isinstance(snapshot, dict) or not {"segments", "device_traces"} <= snapshot.keys():
            raise ValueError("it has no segments and device_traces")
        _check(snapshot)
    except MemoryError:
        raise
    # A damaged pickle can raise almost any exception.
    except Exception as error:
        raise ValueError(f"{path}: not a memory snapshot: {error}") from error
    return snapshot


def _check(snapshot: Snapshot) -> None:
    """Raise ValueError for a value of another type than torch writes, or a very long text."""
    stacks: dict[int, object] = {}  # each is in many records
    for segment in snapshot["segments"]:
        _check_record(segment, {"device": _NUMBER})
        for block in segment["blocks"]:
            _check_record(block, _BLOCK)
            stacks[id(block.get("frames"))] = block.get("frames")
    for events in snapshot["device_traces"]:
        for event in events:
            _check_record(event, _EVENT)
            stacks[id(event.get("frames"))] = event.get("frames")
    for annotation in snapshot.get("external_annotations") or ():
        _check_record(annotation, _ANNOTATION)
    for frames in filter(None, stacks.values()):
        if not isinstance(frames, list | tuple) or len(frames) > _MOST_FRAMES:
            raise ValueError(f"a stack in it is no list of at most {_MOST_FRAMES} frames")
        for frame in frames:
            _check_record(frame, _FRAME)


def _check_record(record: Any, types: Mapping[str, _Types]) -> None:
    if not isinstance(record, dict):
        raise ValueError(f"a record in it is of the type {type(record).__name__}")
    for name, kinds in types.items():
        value = record.get(name)
        if value is None:
            continue
        if not isinstance(value, kinds):
            raise ValueError(f"{name} in it is of the type {type(value).__name__}")
        if isinstance(value, str) and len(value) > _LONGEST_TEXT:
            raise ValueError(f"{name} in it has more than {_LONGEST_TEXT:,} characters")
