"""Atomic writes, disk errors as RunUnwritable, and memory that is given back to the system."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from orchestrator.common.errors import RunUnwritable

Content = str | bytes | Iterable[str]  # of a file; an iterable is written piece by piece

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_THRESHOLD_BYTES = 128 * 1024  # glibc's default of both


def return_freed_memory() -> None:
    """Have glibc return freed blocks of more than 128 KiB to the system.

    By default glibc raises this limit to the size of the largest block that was freed (up to
    32 MiB), and afterwards keeps blocks of that size for itself.
    """
    with suppress(OSError, AttributeError):  # another C library
        for threshold in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            ctypes.CDLL(None).mallopt(threshold, _THRESHOLD_BYTES)


def trim_memory() -> None:
    """To the system, what was used and is not any more, where the C library can; else what one stage needs adds to the next."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def flush_folder(folder: Path) -> None:
    """What the folder has by now, also after a power cut, where the file system can promise that of folders."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def replace_file(path: Path, content: Content) -> None:
    """Written aside, on disk, then renamed: whole or not there, whatever is killed."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("wb") as file:
            for piece in [content] if isinstance(content, str | bytes) else content:
                file.write(piece.encode() if isinstance(piece, str) else piece)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
    except BaseException:  # also of what makes the pieces
        with suppress(OSError):
            aside.unlink()
        raise


@contextmanager
def writing(folder: Path, elsewhere: str = "Name a writable folder with --out") -> Iterator[None]:
    """Turns the file system's refusals into one line with its remedy. elsewhere: that of a folder that cannot be written."""
    try:
        yield
    except OSError as error:
        remedies = {
            errno.ENOSPC: "Free some space and run again: what is finished is kept, and not measured twice",
            errno.EDQUOT: "Free some of your quota and run again: what is finished is kept, and not measured twice",
            errno.EROFS: elsewhere,
            errno.EACCES: elsewhere,
            errno.ENOENT: "It was taken away meanwhile: run again, to begin anew what it held",
            errno.ENAMETOOLONG: "Give a shorter name, in the config or with --out",
        }
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise RunUnwritable(
            f"{folder}: cannot be written: {reason}", remedies.get(error.errno or 0, "")
        ) from error
