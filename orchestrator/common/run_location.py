"""The location of a run: a folder, or an address such as s3://bucket/folder."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TypeAlias, TypeVar

from orchestrator.common.errors import ConfigError

_SCHEMES = "s3a?|gs|gcs|abfss?|az|adl|hdfs|file|memory|https?|ftp|sftp|ssh|github"
# A known scheme without slashes, or any with a single one.
_MISTYPED = re.compile(rf"(?:{_SCHEMES}):(?!//)|[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")
_VOLATILE = re.compile(r"memory://|.*::memory://")

RunLocation: TypeAlias = Path | str  # a folder, or an address
Folder = TypeVar("Folder")


def require_name(folder: Folder, option: str) -> Folder:
    """Return the folder. Raise ConfigError if its name is empty or not UTF-8.

    A shell turns a variable that is not set into an empty text, which Path would take for the
    current folder. A name that is not UTF-8 cannot be stored in run.json, and no report can show it.
    """
    if not str(folder).strip():
        raise ConfigError(
            f"{option} {str(folder)!r}: names no folder", "Is a variable of the shell not set?"
        )
    path = os.path.abspath(str(folder))
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{path}: is not valid UTF-8", "Rename this folder") from error
    return folder


def require_lasting(text: str, option: str = "") -> None:
    """Raise ConfigError for an address that keeps nothing, or that would be taken for a folder."""
    if _VOLATILE.match(text):
        raise ConfigError(
            f"{text}: is lost when this process ends", "Name a folder, or s3://bucket/folder"
        )
    if _MISTYPED.match(text) and not Path(text).exists():
        scheme, _, rest = text.partition(":")
        raise ConfigError(
            f"{option} {text}: looks like an address with a missing slash".strip(),
            f"Write {scheme}://{rest.lstrip('/')}, or ./{text} for a folder",
        )


def is_address(text: object) -> bool:
    return bool(re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", str(text)))


def split_cell(text: str) -> tuple[str, str]:
    """Split ADDRESS:CELL. The cell is empty if the text has none."""
    address, _, cell = text.rpartition(":")
    # The last colon may be that of the scheme, or of HOST:PORT in a query.
    if "/" in cell or "?" in address:
        return text, ""
    return address, cell
