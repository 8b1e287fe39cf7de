"""Distinguish addresses such as s3://bucket/folder from folders, also as types of the command line.

A separate module, because the command line imports it before it needs pyarrow.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeAlias

import click

from orchestrator.common.errors import ConfigError

RunLocation: TypeAlias = Path | str  # a folder, or an address


def require_name(folder: Any, option: str) -> Any:
    """Return the folder. Raise ConfigError if its name is empty.

    A shell turns a variable that is not set into an empty text, which Path would take for the
    current folder.
    """
    if not str(folder).strip():
        raise ConfigError(
            f"{option} {str(folder)!r}: names no folder", "Is a variable of the shell not set?"
        )
    return folder


def is_address(text: object) -> bool:
    return bool(re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", str(text)))


def split_cell(text: str) -> tuple[str, str]:
    """Split ADDRESS:CELL. The cell is empty if the text has none."""
    address, _, cell = text.rpartition(":")
    # The last colon may be that of the scheme, or of HOST:PORT in a query.
    if "/" in cell or "?" in address:
        return text, ""
    return address, cell


class FolderType(click.Path):
    """A folder whose name is not empty."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        option = "--out" if isinstance(param, click.Option) else "RUN"
        return super().convert(require_name(value, option), param, ctx)


class RunLocationType(FolderType):
    """A folder, converted to a path, or an address as it was typed."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if is_address(value) else super().convert(value, param, ctx)
