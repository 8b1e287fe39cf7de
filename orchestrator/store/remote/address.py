"""How a place elsewhere is told from a folder of this host: by a scheme. Apart, so that to tell loads nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeAlias

import click

from orchestrator.common.errors import ConfigError

RunLocation: TypeAlias = Path | str  # of a run: a folder, or the address of one elsewhere


def require_name(folder: Any, what: str) -> Any:
    """Raises ConfigError where it is empty."""
    if not str(folder).strip():
        raise ConfigError(
            f"{what} {str(folder)!r}: names no folder", "Is a variable of the shell not set?"
        )
    return folder


def is_address(text: object) -> bool:
    return bool(re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", str(text)))


def split_cell(text: str) -> tuple[str, str]:
    """`ADDRESS:CELL`, the cell empty where none is named."""
    address, _, cell = text.rpartition(":")
    return (text, "") if "/" in cell or "?" in address else (address, cell)


class FolderType(click.Path):
    """A folder that is named: an empty text, as a shell makes of a variable that is not set, would be the one that one is in."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(
            require_name(value, "--out" if isinstance(param, click.Option) else "RUN"), param, ctx
        )


class RunLocationType(FolderType):
    """A folder, as a path, or an address, as it was typed."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if is_address(value) else super().convert(value, param, ctx)
