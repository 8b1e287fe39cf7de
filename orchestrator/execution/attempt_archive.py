"""Copies an attempt's files from a host that does not share the driver's file system.

The driver writes a token into the attempt's folder. A host that does not find it measures in a
local folder, sends the files through Ray, and keeps only what its compilers have cached.
"""

from __future__ import annotations

import io
import os
import secrets
import shutil
import tarfile
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.common.hashing import sha256
from orchestrator.execution.child_environment import write_rerun_script
from tasks.spec.attempt import ATTEMPT_FILE, Attempt

_TOKEN_FILE = ".driver"
_COLD_CACHE = "cache"  # of a cell that compiles as if for the first time; never sent


@dataclass(frozen=True)
class AttemptArchive:
    """The files of an attempt as a compressed tar file."""

    attempt: Attempt
    content: bytes


def write_folder_token(attempt: Attempt) -> str:
    """Write a random token into the driver's folder of an attempt. Raises OSError."""
    # Two hosts may have different folders with the same path, so the path alone proves nothing.
    attempt.path.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(16)
    (attempt.path / _TOKEN_FILE).write_text(token)
    return token


def shares_folder(attempt: Attempt, token: str) -> bool:
    """Return True if this host has the driver's folder of the attempt."""
    try:
        return (attempt.path / _TOKEN_FILE).read_text() == token
    except OSError:
        return False


def in_local_folder(attempt: Attempt) -> Attempt:
    """Return the attempt in a folder of this host, in which the cells of a run share a cache.

    Variables with paths of the driver's folders are removed, because these paths do not exist here.
    Raises PermissionError if another user owns the folder.
    """
    run = attempt.path.parents[2]
    own = Path(tempfile.gettempdir()) / f"sweep-{os.getuid()}-{sha256(str(run))[:12]}"
    own.mkdir(mode=0o700, exist_ok=True)
    if own.stat().st_uid != os.getuid():
        # Compilers execute what they find in their caches.
        raise PermissionError(f"{own} is another user's")
    folder = own / "artifacts" / attempt.cell.id / str(attempt.number)
    env = dict(attempt.settings.env)
    for name, value in attempt.settings.env.items():
        if value.startswith(str(run.parent)):
            del env[name]
    return replace(attempt, folder=str(folder), settings=replace(attempt.settings, env=env))


def move_into_archive(measured: Attempt, original: Attempt) -> AttemptArchive:
    """Move the files of an attempt into an archive.

    Args:
        original: the attempt with the driver's folder.
    """
    stream = io.BytesIO()
    # The fastest compression: the slot stays occupied until the archive is complete.
    with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=1) as tar:
        for path in sorted(measured.path.glob("*")):
            if path.name != _COLD_CACHE:
                tar.add(path, path.name)
    shutil.rmtree(measured.path, ignore_errors=True)
    return AttemptArchive(original, stream.getvalue())


def unpack(archive: AttemptArchive) -> None:
    """Write the files into the driver's folder.

    Raises OSError, ValueError or tarfile.TarError, the last also for paths outside of the folder.
    """
    folder = archive.attempt.path
    with tarfile.open(fileobj=io.BytesIO(archive.content)) as tar:
        for member in tar:
            _extract(tar, member, folder)
    if (folder / ATTEMPT_FILE).exists():
        write_rerun_script(archive.attempt)  # the one in the archive names the other host's folder


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    # tarfile's own filters exist since Python 3.11.4 only.
    target = folder / member.name
    if not target.resolve().is_relative_to(folder.resolve()):
        raise tarfile.ExtractError(f"{member.name} lies outside of {folder}")
    # Links are skipped: they point to files of the other host.
    content = tar.extractfile(member) if member.isfile() else None
    if content is None:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with content, target.open("wb") as file:
        shutil.copyfileobj(content, file)
