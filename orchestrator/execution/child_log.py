"""What a child prints, kept from filling the disk: its beginning and its end, which is where a death is explained."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

KEPT_BYTES = 4 * 1024**2  # of the beginning, and as many of the end
_LONGEST_BYTES = 4 * KEPT_BYTES  # cutting is not for a few lines too many
_BLOCK_BYTES = 512  # in which stat counts
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of Linux's fallocate


def free_middle(log: Path) -> int:
    """Gives the middle of a log that has grown too long back to the disk, while the child goes on appending.

    What it prints meanwhile is neither lost nor out of its place. Where the file system cannot do that, the log is cut at once,
    and the bytes are given that were left out.
    """
    if not log.exists() or log.stat().st_blocks * _BLOCK_BYTES <= _LONGEST_BYTES:
        return 0
    try:
        with log.open("rb+") as file:
            _punch(file.fileno(), KEPT_BYTES, os.fstat(file.fileno()).st_size - 2 * KEPT_BYTES)
        return 0
    except (OSError, AttributeError):
        return remove_middle(log)


def remove_middle(log: Path) -> int:
    """Takes the middle out of a log that has grown too long, and gives how many bytes that were. Nobody writes any more."""
    if not log.exists() or log.stat().st_size <= _LONGEST_BYTES:
        return 0
    with log.open("rb+") as file:
        file.seek(-KEPT_BYTES, 2)
        taken = file.tell() - KEPT_BYTES
        end = file.read(KEPT_BYTES)
        file.truncate(KEPT_BYTES)
    with log.open("ab") as file:
        file.write(f"\n[{taken} bytes that were printed here are left out]\n".encode() + end)
    return taken


def _punch(file: int, start: int, length: int) -> None:
    """Raises OSError, or AttributeError where the C library has no such function."""
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if call(file, _KEEP_SIZE | _PUNCH_HOLE, start, length):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def tail(log: Path, most_bytes: int) -> str:
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(-min(most_bytes, log.stat().st_size), 2)
        return file.read(most_bytes).decode(errors="replace")
