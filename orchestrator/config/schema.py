"""The YAML of a sweep, loaded safely, validated strictly, every error with its place in the file.

YAML 1.2: `no` and `off` are words, `1e-3` is a number. Keys given twice are errors.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ruamel.yaml.comments import CommentedMap

from orchestrator.common.errors import ConfigError, suggestion
from orchestrator.config.yaml_source import (
    MAX_BYTES,
    KeyPath,
    Source,
    Values,
    config_error,
    load_yaml,
    plain,
)
from tasks.instruments import instrument_names
from tasks.spec.parameters import MOST_GIB
from tasks.spec.registry import all_tasks

LONGEST_S = 1e8  # of a time limit: some three years, where the timers of some systems end at 68


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Override(Strict):
    """Sets parameters of the cells that match `when`."""

    when: Values
    set: Values


class Grid(Strict):
    """One block: the product of its axes, over fixed values, less what is excluded, plus what is included."""

    task: str = Field(description="the kind of measurement")
    axes: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(
        default_factory=dict, description="lists of values; every combination is a cell"
    )
    fixed: Values = Field(
        default_factory=dict, description="parameters that all cells of this grid share"
    )
    exclude: list[Values] = Field(
        default_factory=list, description="cells to leave out; a list of values matches any"
    )
    override: list[Override] = Field(
        default_factory=list, description="other parameters for some cells"
    )
    include: list[Values] = Field(default_factory=list, description="further cells, spelled out")


class Limits(Strict):
    timeout_s: Annotated[float, Field(gt=0, le=LONGEST_S)] = Field(
        900.0, description="of one attempt, from when its task begins"
    )
    attempts: Annotated[int, Field(ge=1)] = Field(
        3, description="tries at a cell that fails, over all runs"
    )
    host_memory_gib: Annotated[float, Field(gt=0, le=MOST_GIB)] | None = Field(
        None, description="resident set at which a cell is ended"
    )


class SweepConfig(Strict):
    """A sweep: what to measure, and how."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = Field(
        description="names the results folder"
    )
    description: str = ""
    results: str | None = Field(None, description="results folder; results/<name> unless given")
    defaults: Values = Field(
        default_factory=dict, description="parameters of every grid that has them"
    )
    instruments: list[str] = Field(
        default_factory=lambda: ["timing", "memory", "telemetry", "backend"]
    )
    limits: Limits = Limits()
    env: dict[str, str] = Field(
        default_factory=dict, description="environment variables of the measuring process"
    )
    grids: Annotated[list[Grid], Field(min_length=1)]


def load_config(path: Path) -> tuple[SweepConfig, Source]:
    """Raises ConfigError, always with the file's name and, where it can be told, the line."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(
                f"{path}: larger than {MAX_BYTES} bytes", "A sweep is a few dozen lines"
            )
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        remedy = _near_files(path) if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", remedy) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: cannot be read: byte {error.start} is not of UTF-8",
            "A config is text: save it as UTF-8",
        ) from error
    return parse_config(text, str(path))


def parse_config(text: str, name: str) -> tuple[SweepConfig, Source]:
    """The same from a text; `name` stands for the file in errors."""
    source = Source(name, load_yaml(text, name))
    if not isinstance(source.document, CommentedMap):
        raise ConfigError(
            f"{name}: is not a mapping of names to values", "See configs/demo.yaml for the form"
        )
    try:
        document = plain(source.document)
    except TypeError as error:
        raise ConfigError(f"{name}: {error}", "Write it without a tag, or in quotes") from error
    config = validate_config(document, source)
    _check_sense(config, source)
    return config, source


def validate_config(document: Values, source: Source) -> SweepConfig:
    try:
        config = SweepConfig.model_validate(document)
    except ValidationError as error:
        raise config_error(error, source, (), _allowed_keys) from error
    for number, grid in enumerate(config.grids):
        _check_known(grid.task, all_tasks(), "task", source, ("grids", number, "task"))
    for number, instrument in enumerate(config.instruments):
        _check_known(instrument, instrument_names(), "instrument", source, ("instruments", number))
    _check_beside_nsys(config.instruments, source)
    _check_env(config.env, source)
    _check_results(config.results, source)
    return config


def _check_sense(config: SweepConfig, source: Source) -> None:
    """Of a config that is written, not of one that was run: what it says in vain."""
    if not config.instruments:
        raise ConfigError(
            f"{source.where(('instruments',))}: is empty: nothing would be measured",
            "Leave it out, or write [timing]",
        )
    for number, grid in enumerate(config.grids):
        for name in grid.fixed:
            if name in grid.axes:
                where = source.where(("grids", number, "fixed", name))
                raise ConfigError(
                    f"{where}: is among the axes of the grid too", "Leave one of them out"
                )


def with_instruments(config: SweepConfig, names: Sequence[str]) -> SweepConfig:
    """The config with these beside its own, as `--instrument` names them. Raises ConfigError."""
    said = Source("--instrument", None)
    for name in names:
        _check_known(name, instrument_names(), "instrument", said, ())
    together = config.model_copy(
        update={"instruments": list(dict.fromkeys([*config.instruments, *names]))}
    )
    _check_beside_nsys(together.instruments, said)
    return together


def _check_beside_nsys(instruments: Sequence[str], source: Source) -> None:
    """What runs under it is slower, and CUPTI, which these use as well, has one user at a time."""
    others = [
        name for name in ("timing", "kernel_time", "kernels", "backend") if name in instruments
    ]
    if "nsys" in instruments and others:
        where = source.where(("instruments",))
        raise ConfigError(
            f"{where}: nsys cannot go with {' or '.join(others)}",
            "Give it a config of its own: [memory, nsys]",
        )


def _check_env(env: Mapping[str, str], source: Source) -> None:
    """Else no process could be started with them."""
    for name, value in env.items():
        where = source.where(("env", name))
        if not name or "=" in name or not _system_takes(name):
            raise ConfigError(
                f"{where}: {name!r} cannot name an environment variable", "Write NAME: value"
            )
        if not _system_takes(value):
            raise ConfigError(
                f"{where}: cannot be the value of an environment variable",
                "Write plain text, without a NUL",
            )


def _check_results(folder: str | None, source: Source) -> None:
    if folder is not None and not (folder.strip() and _system_takes(folder)):
        raise ConfigError(
            f"{source.where(('results',))}: {folder!r} names no folder",
            "Leave it out for results/<name>",
        )


def _system_takes(text: str) -> bool:
    """Whether it may be in an environment or a path: without a NUL, which would end it, and such as has an encoding."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def json_schema() -> dict[str, Any]:
    """For editors. The parameters of every task are offered where they may stand."""
    schema = SweepConfig.model_json_schema()
    grid = schema["$defs"]["Grid"]
    grid["properties"]["task"]["enum"] = sorted(all_tasks())
    axes: dict[str, Any] = {}
    for task in all_tasks().values():
        own = task.params.model_json_schema(by_alias=True)
        schema["$defs"] |= own.pop("$defs", {})
        axes |= own["properties"]
    grid["properties"]["fixed"] |= {"properties": axes, "additionalProperties": False}
    grid["properties"]["axes"] |= {
        "properties": {
            name: {"type": "array", "minItems": 1, "items": axis} for name, axis in axes.items()
        },
        "additionalProperties": False,
    }
    return schema


def _allowed_keys(place: KeyPath) -> list[str]:
    """The keys that may stand where the last step of `place`, an unknown one, stands."""
    parts: dict[str, type[BaseModel]] = {"grids": Grid, "limits": Limits, "override": Override}
    named = [parts[str(step)] for step in place[:-1] if str(step) in parts]
    return list((named or [SweepConfig])[-1].model_fields)


def _check_known(
    word: str, allowed: Sequence[str] | Mapping[str, Any], kind: str, source: Source, place: KeyPath
) -> None:
    if word not in allowed:
        raise ConfigError(
            f"{source.where(place)}: unknown {kind} {word!r}", suggestion(word, allowed)
        )


def _near_files(path: Path) -> str:
    siblings = sorted(str(p) for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
    return suggestion(path, siblings) if siblings else ""
