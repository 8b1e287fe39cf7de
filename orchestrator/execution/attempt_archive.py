"""What an attempt leaves on a host that does not share the driver's folder comes to the driver: log, journal, artifacts.

The driver leaves a mark in the attempt's folder before it is measured. A host that does not see it measures in a folder of its
own, sends what is there, and keeps nothing but what its compilers have cached.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import shutil
import tarfile
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.common.hashing import text_digest
from orchestrator.execution.attempt import write_rerun_script
from tasks.spec.attempt import ATTEMPT_FILE, Attempt

_MARK = ".driver"
_OF_ONE_ATTEMPT = "cache"  # of a cell that compiles as if for the first time: removed in any case


@dataclass(frozen=True)
class AttemptArchive:
    """content: a tar file, compressed."""

    attempt: Attempt
    content: bytes


def write_folder_token(attempt: Attempt) -> str:
    """What tells the driver's own folder from another of that name. Raises OSError."""
    mark = secrets.token_hex(16)
    attempt.path.mkdir(parents=True, exist_ok=True)
    (attempt.path / _MARK).write_text(mark)
    return mark


def shares_folder(attempt: Attempt, mark: str) -> bool:
    try:
        return (attempt.path / _MARK).read_text() == mark
    except OSError:
        return False


def in_local_folder(attempt: Attempt) -> Attempt:
    """The same in a folder of this host, where the cells of a run share what they compile.

    Variables that lead to the driver's folders are left out: they lead nowhere here. Raises PermissionError where somebody
    else has made that folder: what compilers find in it they run.
    """
    run = attempt.path.parents[2]
    folder = (
        _own_folder(text_digest(str(run))[:12])
        / "artifacts"
        / attempt.cell.id
        / str(attempt.number)
    )
    env = {
        name: value
        for name, value in attempt.settings.env.items()
        if not value.startswith(str(run.parent))
    }
    return replace(attempt, folder=str(folder), settings=replace(attempt.settings, env=env))


def _own_folder(name: str) -> Path:
    folder = Path(tempfile.gettempdir()) / f"sweep-{os.getuid()}-{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} is another user's")
    return folder


def pack(measured: Attempt, asked: Attempt) -> AttemptArchive:
    """All that it left, which then is here no more. asked: as the driver knows it."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=1) as tar:
        for path in sorted(measured.path.iterdir()) if measured.path.is_dir() else ():
            if path.name != _OF_ONE_ATTEMPT:
                tar.add(path, path.name)
    shutil.rmtree(measured.path, ignore_errors=True)
    return AttemptArchive(asked, stream.getvalue())


def unpack(parcel: AttemptArchive) -> None:
    """Into the driver's folder. Raises OSError, ValueError or tarfile.TarError, the last for what would lie elsewhere."""
    folder = parcel.attempt.path
    with tarfile.open(fileobj=io.BytesIO(parcel.content)) as tar:
        for member in tar:
            target = folder / member.name
            if not target.resolve().is_relative_to(folder.resolve()):
                raise tarfile.ExtractError(f"{member.name} lies outside of {folder}")
            if (
                content := tar.extractfile(member) if member.isfile() else None
            ):  # no links: they are of the other host
                target.parent.mkdir(parents=True, exist_ok=True)
                with content, target.open("wb") as file:
                    shutil.copyfileobj(content, file)
    file_of_attempt = folder / ATTEMPT_FILE
    if file_of_attempt.exists():  # says where it is: see `RunWriter.attempts_without_row`
        said = json.loads(file_of_attempt.read_text())
        file_of_attempt.write_text(json.dumps({**said, "folder": parcel.attempt.folder}, indent=1))
        write_rerun_script(parcel.attempt)  # the archive's names paths of the other host
