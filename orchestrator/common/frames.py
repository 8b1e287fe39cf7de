"""Stacks in logs and messages: which of their frames are of the user's code.

The others are of this program, torch and Python. Their paths are those of the machine that measured:
the program's folder is that of the frame of its entry point.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import groupby

from orchestrator.common.text import counted

_FRAME = re.compile(r'\s*File "(.+)", line \d+')
DUMPED = re.compile(r'\s*File "(.+)", line \d+ in ')  # in a dump of a hang or a crash
_ENTRY = "tasks/__main__.py"
_PROGRAM = ("tasks", "model", "orchestrator")
_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/(?:torch|triton)/|/lib(?:64)?/python3\.\d+/(?!(?:site|dist)-packages/)|<"
)


def own_frames(lines: Sequence[str]) -> list[str]:
    """Return the frames of the user's code, such as `File "gpt.py", line 3 in forward`."""
    is_own = _recognise(lines)
    return [line.strip() for line in lines if is_own(line)]


def without_other_frames(lines: Sequence[str]) -> list[str]:
    """Return lines in which other frames of a dump are replaced by how many there are."""
    is_own, shown = _recognise(lines), []
    for is_other, group in groupby(
        lines, lambda line: bool(DUMPED.match(line)) and not is_own(line)
    ):
        members = list(group)
        if is_other:
            members = [f"  … {counted(len(members), 'frame')} of torch, Python or this program"]
        shown += members
    return shown


def _recognise(lines: Sequence[str]) -> Callable[[str], bool]:
    """Return a function that is true for a line with a frame of the user's code."""
    paths = [found[1] for found in map(_FRAME.match, lines) if found]
    entry = next((path for path in paths if path.endswith(f"/{_ENTRY}")), None)
    folder = None if entry is None else entry.removesuffix(_ENTRY)

    def is_own(line: str) -> bool:
        found = _FRAME.match(line)
        if found is None or _LIBRARY.search(found[1]):
            return False
        below = found[1].removeprefix(folder) if folder else found[1]
        return below == found[1] or below.partition("/")[0] not in _PROGRAM

    return is_own
