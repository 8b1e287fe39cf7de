"""Types of command-line options."""

from __future__ import annotations

import math
import re
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from orchestrator.common.errors import ConfigError
from orchestrator.common.run_location import RunLocation, is_address, require_lasting, require_name

if TYPE_CHECKING:
    from orchestrator.hardware.gpu_catalog import GpuModel


class ReferenceDevice(click.ParamType[str]):
    """A device for which others have published numbers."""

    name = "device"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        from orchestrator.common.reference_devices import find_device

        return find_device(str(value))

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"[{'|'.join(self._names())}]"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(name) for name in self._names() if name.startswith(incomplete)]

    def _names(self) -> list[str]:
        from orchestrator.common.reference_devices import ALL, DEVICES

        return [*DEVICES, ALL]


class Gpu(click.ParamType["GpuModel"]):
    """A GPU of the catalogue, or any of a size such as `24GiB`."""

    name = "gpu"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> GpuModel:
        from orchestrator.hardware.gpu_catalog import find_gpu

        gpu = find_gpu(str(value))
        if gpu.device is None and not str(value).strip().lower().endswith("gib"):
            # A card that is sold with 24 GB has 24 GiB.
            click.echo(f"sweep: {_option(param)} {value}: understood as a {gpu.name}", err=True)
        return gpu


class Percentage(click.ParamType[float]):
    """A percentage such as `3%`, converted to 0.03."""

    name = "percentage"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        # The sign is required: 3 could mean 3 % or 300 %.
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", str(value).strip())
        if not found or float(found[1]) > 100:
            raise ConfigError(f"{_option(param)} {value}: is not a percentage", "Write 3% or 0.5%")
        return float(found[1]) / 100


class TokensPerUpdate(click.ParamType[int]):
    """A number such as `tokens_per_update=16384`, converted to 16384."""

    name = "tokens per update"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        found = re.fullmatch(r"\s*tokens_per_update\s*=\s*([1-9]\d{0,17})\s*", str(value))
        if not found:
            problem = f"{_option(param)} {value}: is not a number of tokens of an update"
            raise ConfigError(problem, "Write tokens_per_update=16384")
        return int(found[1])


class Megabytes(click.ParamType[float]):
    """A size in 10⁶ bytes, finite and not negative."""

    name = "megabytes"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        # click.FloatRange accepts `nan`: no comparison with it is true, so no bound excludes it.
        try:
            size = float(str(value))
        except ValueError:
            size = math.nan
        if not 0 <= size < math.inf:
            raise ConfigError(
                f"{_option(param)} {value}: is not a size in megabytes", "Write 25 or 0.5"
            )
        return size


class Duration(click.ParamType[float]):
    """A duration such as `90s`, converted to seconds. Without its unit, 9 could mean 9 minutes."""

    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        from orchestrator.config.schema import LONGEST_S

        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h)", str(value).strip())
        if not found:
            problem = f"{_option(param)} {value}: is not a duration with its unit"
            raise ConfigError(problem, "Write 90s, 9m or 2h")
        seconds = float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]
        if seconds > LONGEST_S:
            raise ConfigError(
                f"{_option(param)} {value}: is longer than {LONGEST_S / 3600:,.0f} h",
                "Leave it out for no limit",
            )
        return seconds


def _option(param: click.Parameter | None) -> str:
    """Return an option as it is typed."""
    if param and param.name:
        return f"--{param.name}".replace("_", "-")
    return "option"


class RunLocationType(click.Path):
    """A folder, converted to a path, or an address as it was typed."""

    takes_addresses = True

    def convert(
        self, value: str | PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> RunLocation:
        option = "--out" if isinstance(param, click.Option) else "RUN"
        require_lasting(str(value), option)
        if self.takes_addresses and is_address(value):
            return str(value)
        if is_address(value):  # which would be taken for the name of a folder
            raise ConfigError(
                f"{option} {value}: is an address", "Name a folder, and copy it there afterwards"
            )
        super().convert(require_name(value, option), param, ctx)  # fails for an unreadable folder
        return Path(value)


class FolderType(RunLocationType):
    """A folder whose name is not empty."""

    takes_addresses = False
