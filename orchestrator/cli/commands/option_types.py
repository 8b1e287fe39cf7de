"""Types of command-line options."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from orchestrator.common.errors import (
    ConfigError,
)

if TYPE_CHECKING:
    pass


class RenamedOption(click.Option):
    """Option whose first name is the current one. The former names still work, and the help does
    not show them.
    """

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        names, self.opts = self.opts, self.opts[:1]
        try:
            return super().get_help_record(ctx)
        finally:
            self.opts = names


class ReferenceDevice(click.ParamType[str]):
    """A device that others have published numbers for."""

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
        from orchestrator.report.references.devices import ALL, DEVICES

        return [*DEVICES, ALL]


class WordChoice(click.Choice[str]):
    """A choice of words that also accepts former words, and prints the current one for them."""

    def __init__(self, words: Sequence[str], former: Mapping[str, str]) -> None:
        super().__init__(words)
        self._former = former

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value in self._former:
            current = self._former[value]
            click.echo(f"--{_option(param, self.name)} {value} is now called {current}", err=True)
            value = current
        return super().convert(value, param, ctx)


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
