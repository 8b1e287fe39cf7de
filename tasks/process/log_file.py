"""Keeps the output of a measuring process from filling the disk.

The beginning and the end of a log stay, which is where a death is explained. The middle goes.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

END_BYTES = 4 * 1024**2  # how much of the beginning and of the end stays
# Four times that, so that a log that is only a few lines too long stays whole.
_MAX_BYTES = 4 * END_BYTES
_BLOCK_BYTES = 512  # the unit of st_blocks
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # flags of Linux's fallocate


def free_middle(log: Path) -> int:
    """Give the disk blocks in the middle of a long log back while the child appends to it.

    A hole moves no bytes, so the child's next line lands where it belongs. File systems without
    holes lose the middle immediately. Returns the number of bytes that were removed that way.
    """
    if not log.exists() or log.stat().st_blocks * _BLOCK_BYTES <= _MAX_BYTES:
        return 0
    try:
        with log.open("rb+") as file:
            size = os.fstat(file.fileno()).st_size
            _punch_hole(file.fileno(), END_BYTES, size - 2 * END_BYTES)
        return 0
    except (OSError, AttributeError):  # AttributeError: only Linux has fallocate
        return remove_middle(log)


def remove_middle(log: Path) -> int:
    """Remove the middle of a log that nobody writes to, and return how many bytes that were."""
    if not log.exists() or log.stat().st_size <= _MAX_BYTES:
        return 0
    with log.open("rb+") as file:
        file.seek(-END_BYTES, 2)
        removed = file.tell() - END_BYTES
        end = file.read(END_BYTES)
        file.truncate(END_BYTES)
    with log.open("ab") as file:
        file.write(f"\n[{removed} bytes that were printed here are left out]\n".encode() + end)
    return removed


def _punch_hole(file: int, start: int, length: int) -> None:
    # os.posix_fallocate has no flags.
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if fallocate(file, _KEEP_SIZE | _PUNCH_HOLE, start, length):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def tail(log: Path, max_bytes: int) -> str:
    """Return the end of a log as text, or an empty string without a log."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(-min(max_bytes, log.stat().st_size), 2)
        return file.read(max_bytes).decode(errors="replace")
