"""Accept only plain files and folders within a results folder.

A folder from somebody else's archive may hold links to files outside of it, which would be read or
overwritten, and named pipes, from which a read never returns. The results folder itself may be a
link.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from orchestrator.common.errors import RunError
from orchestrator.store.layout import ARTIFACTS
from orchestrator.store.tables import SCHEMAS

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def require_plain(folder: Path) -> None:
    """Raise RunError if a results folder holds a link, a pipe or a device.

    Checked are its entries and those of the folders of tables and of `artifacts`. The files of one
    attempt are checked when they are read (`is_plain`).
    """
    for path in (folder, *(folder / name for name in (ARTIFACTS, *SCHEMAS))):
        for entry in _entries(path):
            # The kind is part of the directory entry: nothing is opened, and few files are asked.
            if not (entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)):
                kind = _KINDS.get(stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode))
                raise RunError(f"{entry.path}: is {kind or 'no plain file'}", "Remove it")


def is_plain(path: Path, folder: Path) -> bool:
    """Return True if a path is a regular file that no link below the folder leads to."""
    below = [parent for parent in path.parents if parent.is_relative_to(folder)]
    if any(parent.is_symlink() for parent in below if parent != folder):
        return False
    return path.is_file() and not path.is_symlink()


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    if not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        yield from entries
