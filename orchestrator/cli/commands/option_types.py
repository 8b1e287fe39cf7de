"""Types of command-line options."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from orchestrator.common.errors import (
    ConfigError,
)

if TYPE_CHECKING:
    pass


class PublishedDevice(click.ParamType[str]):
    """A device that numbers were published of. They are read where they are asked for, so that `--help` is there at once."""

    name = "device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from orchestrator.report.references.devices import find_device

        return find_device(value)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"[{'|'.join(self._words())}]"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(word) for word in self._words() if word.startswith(incomplete)]

    def _words(self) -> list[str]:
        from orchestrator.report.references.devices import ALL, devices

        return [*devices(), ALL]


class Percentage(click.ParamType[float]):
    """Written as `3%`, given as 0.03."""

    name = "percentage"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", str(value).strip())
        if not found or float(found[1]) > 100:
            raise ConfigError(
                f"--{_option(param, self.name)} {value}: is not a percentage", "Write 3% or 0.5%"
            )
        return float(found[1]) / 100


class Megabytes(click.ParamType[float]):
    """In 10⁶ bytes: finite and not negative, which click's own range takes `nan` for."""

    name = "megabytes"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            size = float(value)
        except ValueError:
            size = math.nan
        if not 0 <= size < math.inf:
            raise ConfigError(
                f"--{_option(param, self.name)} {value}: is not a size in megabytes",
                "Write 25 or 0.5",
            )
        return size


def _option(param: click.Parameter | None, name: str) -> str:
    """As it is typed."""
    return ((param and param.name) or name).replace("_", "-")
