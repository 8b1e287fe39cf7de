"""Files of a results folder that somebody else may have written or damaged.

A folder from somebody else's archive may hold links to files outside of it, which would be read or
overwritten, and named pipes, from which a read never returns. Only plain files and folders are
accepted; the results folder itself may be a link. JSON files are checked against a model. A text
from a file or a listing becomes part of a path only if it is a plain name.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from orchestrator.common.errors import RunError, RunMismatch, RunUnwritable
from orchestrator.common.hashing import sha256
from orchestrator.store.layout import ARTIFACTS, CACHE, REPORT, SCHEMA_VERSION
from tasks.spec.tables import STORED_TABLES

DAMAGED = "is damaged, or of another program"
Contents = TypeVar("Contents", bound=BaseModel)
_DIGEST = "digest"
# The folders of a run in which anything is read or written without a further check.
FOLDERS = ("", ARTIFACTS, CACHE, REPORT, *(table.name for table in STORED_TABLES))
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def require_plain(folder: Path, names: Iterable[str] = FOLDERS) -> None:
    """Raise RunError if a results folder holds a link, a pipe or a device.

    names: the folders whose entries are checked, those of a run by default. The files of one
    attempt are checked when they are read (`is_plain`), and the folders of a report when it is
    written (`require_no_link`).
    """
    for path in (folder / name for name in names):
        for entry in list(os.scandir(path)) if path.is_dir() else ():
            # The kind is part of the directory entry: nothing is opened, and few files are asked.
            if not (entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)):
                kind = _KINDS.get(stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode))
                raise RunError(f"{entry.path}: is {kind or 'no plain file'}", "Remove it")


def is_plain(path: Path, folder: Path) -> bool:
    """Return True if a path is a regular file that no link below the folder leads to."""
    return path.is_file() and not _leads_elsewhere(path, folder)


def is_plain_name(text: str) -> bool:
    """Return True for the name of one file or folder, which leads nowhere else."""
    return text not in ("", ".", "..") and not set(text) & {"/", "\\", "\0"}


def require_no_link(path: Path, folder: Path) -> None:
    """Raise RunUnwritable if a link below the folder leads to a path that is to be written."""
    for parent in reversed(path.relative_to(folder).parents):
        if _leads_elsewhere(folder / parent, folder):
            raise RunUnwritable(f"{folder / parent}: is a symbolic link", "Remove it")


def _leads_elsewhere(path: Path, folder: Path) -> bool:
    return Path(os.path.realpath(path)) != Path(os.path.realpath(folder), path.relative_to(folder))


def read_json(
    content: bytes, model: type[Contents], name: str, remedy: str
) -> tuple[dict[str, Any], Contents]:
    """Return the JSON object of a file without its digest, and the same as a model.

    name: the file in messages. remedy: what to do if it is damaged. Raise RunError if it is,
    RunMismatch if a newer program wrote it.
    """
    try:
        found = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise RunError(f"{name}: is not JSON: {error}", remedy) from error
    if not isinstance(found, dict):
        raise RunError(f"{name}: {DAMAGED}: it is no JSON object", remedy)
    # Before anything else is checked: a newer schema may have other types.
    schema = found.get("schema_version")
    if isinstance(schema, int | float) and schema > SCHEMA_VERSION:
        raise RunMismatch(
            f"{name}: was written with schema {schema}, newer than {SCHEMA_VERSION}", "Update"
        )
    try:
        checked = model.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise RunError(f"{name}: {DAMAGED}: {key}: {first['msg']}", remedy) from error
    digest = found.pop(_DIGEST, None)  # files of older versions have none
    if digest not in (None, sha256(json.dumps(found))):
        raise RunError(f"{name}: is damaged: it differs from what was written", remedy)
    return found, checked


def digested_json(content: Mapping[str, object]) -> str:
    """Return the text of a JSON file, with a digest that detects accidents."""
    return json.dumps({**content, _DIGEST: sha256(json.dumps(content))}, indent=1)
