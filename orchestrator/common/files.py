"""Atomic writes, locks, errors of the disk as RunUnwritable, and returned memory."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from orchestrator.common.errors import LIMIT_REMEDIES, RunUnwritable

Content = str | bytes | Iterable[str]  # of a file; an iterable is written piece by piece

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_THRESHOLD_BYTES = 128 * 1024  # glibc's default of both
NAME_ANOTHER = "Name a writable folder with --out"
_REMOVED = "It was removed: run again, to measure again what it held"
_RUN_AGAIN = "run the command again: what was measured before is stored"


def return_freed_memory() -> None:
    """Have this process return freed memory to the system, which takes up to a tenth more time.

    pyarrow's own allocator keeps it, and glibc keeps blocks of up to 32 MiB once one was freed.
    Only a command calls this, before it imports pyarrow: it also holds for other libraries.
    """
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"
    with suppress(OSError, AttributeError):  # another C library
        for threshold in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            ctypes.CDLL(None).mallopt(threshold, _THRESHOLD_BYTES)


def trim_memory() -> None:
    """Return freed memory to the system now, before the next stage allocates its own."""
    with suppress(OSError, AttributeError):  # another C library
        _c_library().malloc_trim(0)


def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def flush_folder(folder: Path) -> None:
    """Have renames and new files of a folder survive a power cut."""
    with suppress(OSError):  # some file systems cannot flush folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def replace_file(path: Path, content: Content) -> None:
    """Write a file that is complete or as it was before, whatever is killed.

    The content is on disk before the rename: otherwise a power cut may leave an empty file under
    the final name.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    pieces = [content] if isinstance(content, str | bytes) else content
    try:
        with partial.open("wb") as file:
            for piece in pieces:
                file.write(piece.encode() if isinstance(piece, str) else piece)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    except BaseException:  # the iterable may raise anything, Ctrl-C included
        with suppress(OSError):
            partial.unlink()
        raise


def try_lock(file: IO[str] | IO[bytes] | int, operation: int, folder: object) -> bool:
    """Lock a file of a folder. Return False if another process holds its lock.

    operation: of `fcntl.flock`. Raise RunUnwritable if the file system has no locks, as some NFS,
    Lustre and FUSE mounts.
    """
    try:
        fcntl.flock(file, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        raise RunUnwritable(
            f"{folder}: this file system has no locks: {os.strerror(error.errno or 0)}",
            "Name a folder of another file system (--out, XDG_CACHE_HOME, TMPDIR), or mount this"
            " one with locks",
        ) from error
    return True


@contextmanager
def writing(
    folder: Path, if_read_only: str = NAME_ANOTHER, if_missing: str = _REMOVED
) -> Iterator[None]:
    """Raise RunUnwritable, with what to do about it, for what the disk refuses during the body.

    if_missing: what to do if the folder does not exist, NAME_ANOTHER if the body creates it.
    """
    remedies = {
        errno.ENOSPC: f"Free some space and {_RUN_AGAIN}",
        errno.EDQUOT: f"Free some of your quota and {_RUN_AGAIN}",
        errno.EROFS: if_read_only,
        errno.EACCES: if_read_only,
        errno.ENOENT: if_missing,
        errno.ENAMETOOLONG: "Give a shorter name, in the config or with --out",
    }
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        remedy = {**remedies, **LIMIT_REMEDIES}.get(error.errno or 0, "")
        if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
            remedy = f"Move {os.fsdecode(error.filename2 or error.filename)} away"
        raise RunUnwritable(f"{folder}: cannot be written: {reason}", remedy) from error
