"""Where in the code an allocation was asked for: its call chain, without what is the same for all."""

from __future__ import annotations

from functools import lru_cache
from pathlib import PurePath

from tasks.snapshots.replay import Frames

BETWEEN = " < "
_LONGEST = 5
_OF_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "<")
_OF_MEASURING = ("/tasks/harness/", "/tasks/instruments/", "/tasks/__main__.py", "/model/parts.py")


def call_chain(frames: Frames) -> str:
    """`model/layers.py:26 forward < model/layers.py:95 forward`: who asked, called by whom; empty where nobody is known.

    Libraries and what measures are left out, folders but for the last are too: a row must not tell whose computer it was.
    """
    own = [frame for frame in frames if _is_own(frame["filename"])]
    return BETWEEN.join(
        f"{_short(frame['filename'])}:{frame['line']} {frame['name']}" for frame in own[:_LONGEST]
    )


@lru_cache(maxsize=1024)
def _is_own(filename: str) -> bool:
    path = f"/{filename}" if not filename.startswith(("/", "<")) else filename
    return not any(
        part in path for part in (*_OF_LIBRARIES[:-1], *_OF_MEASURING)
    ) and not path.startswith(_OF_LIBRARIES[-1])


@lru_cache(maxsize=1024)
def _short(filename: str) -> str:
    return "/".join(PurePath(filename).parts[-2:])
