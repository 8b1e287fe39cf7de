"""Format the call chain of an allocation, without the frames that all chains share."""

from __future__ import annotations

from functools import lru_cache
from pathlib import PurePath

from tasks.snapshots.replay import Frames

BETWEEN = " < "
_LONGEST = 5
# Parts of the paths of libraries, and of the code of this program that every chain passes through.
_FOREIGN = (
    "/site-packages/", "/dist-packages/", "/lib/python",
    "/tasks/harness/", "/tasks/instruments/", "/tasks/__main__.py", "/model/parts.py",
)  # fmt: skip


def call_chain(frames: Frames) -> str:
    """Return a call chain such as `model/layers.py:26 forward < model/layers.py:95 forward`.

    It starts with the innermost function, and is empty without Python frames. Frames of
    libraries and of this program are left out.
    """
    calls = []
    for frame in frames:
        if _is_own(frame["filename"]):
            calls.append(f"{_short(frame['filename'])}:{frame['line']} {frame['name']}")
    return BETWEEN.join(calls[:_LONGEST])


@lru_cache(maxsize=1024)
def _is_own(filename: str) -> bool:
    if filename.startswith("<"):  # generated code, such as `<string>` or `<frozen …>`
        return False
    path = f"/{filename}"
    return not any(part in path for part in _FOREIGN)


@lru_cache(maxsize=1024)
def _short(filename: str) -> str:
    # Only the last folder: rows may be published, and a full path may contain a user name.
    return "/".join(PurePath(filename).parts[-2:])
