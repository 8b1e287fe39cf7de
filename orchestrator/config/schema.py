"""The config of a sweep: its fields, its checks, and its JSON Schema for editors.

A text enters, a SweepConfig leaves. Validation is strict: an unknown key or a number in quotes is
an error, and each error names its place in the file.
"""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from ruamel.yaml.comments import CommentedMap

from orchestrator.common.errors import ConfigError
from orchestrator.common.suggestions import suggestion
from orchestrator.config.hints import quoted
from orchestrator.config.yaml_source import (
    MAX_BYTES,
    KeyPath,
    Source,
    config_error,
    explain_unknown_key,
    load_yaml,
    plain,
)
from tasks.instruments import instrument_names
from tasks.spec.axes import Values
from tasks.spec.messages import assignments
from tasks.spec.parameters import MOST_GIB
from tasks.spec.registry import all_axes, all_tasks

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # a folder has it
LONGEST_VARIABLE = 131_071  # bytes of NAME=VALUE: Linux's MAX_ARG_STRLEN, less the final NUL
# Variables that `env` may not have: what is wrong with them, and the remedy. With the first two no
# measuring process runs a line of Python; wrong values of others, such as PYTHONHASHSEED, are named
# by Python in the row of the cell. With the last one, cells that run at the same time would share
# GPUs.
_NO_PYTHON = ("Python does not start with it", "Leave it out")
_REFUSED = {
    "PYTHONHOME": _NO_PYTHON,
    "LD_TRACE_LOADED_OBJECTS": _NO_PYTHON,
    "CUDA_VISIBLE_DEVICES": (
        "the scheduler gives each cell its GPU",
        "Set it for the command: CUDA_VISIBLE_DEVICES=… sweep run",
    ),
}
_PIPE_S = 10.0  # longest wait for the next piece of a config from a pipe
LONGEST_S = 1e8  # a time limit of about three years: some timers overflow at 68 years


class Strict(BaseModel):
    """Base of the config's models: without conversion of types, unknown keys, inf or nan."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


def _as_list(value: object) -> list[object]:
    """Return a single value of an axis as a list."""
    return value if isinstance(value, list) else [value]


AxisValues = Annotated[list[object], Field(min_length=1)]


class Override(Strict):
    """Sets parameters of the cells that match `when`."""

    when: Values
    set: Values


class Grid(Strict):
    """One block: the product of its axes and zip groups, without `exclude`, with `include`."""

    task: str = Field(description="the kind of measurement")
    axes: dict[str, Annotated[AxisValues, BeforeValidator(_as_list)]] = Field(
        default_factory=dict, description="lists of values; every combination is a cell"
    )
    zip: list[Annotated[dict[str, AxisValues], Field(min_length=1)]] = Field(
        default_factory=list,
        description="groups of axes whose lists advance together; groups and axes are multiplied",
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
    """When a cell is ended or given up."""

    timeout_s: Annotated[float, Field(gt=0, le=LONGEST_S)] = Field(
        900.0, description="seconds of one attempt, from the start of its task"
    )
    attempts: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        3, description="attempts at a cell that fails, over all runs"
    )
    host_memory_gib: Annotated[float, Field(gt=0, le=MOST_GIB)] | None = Field(
        None, description="resident set in GiB at which a cell is ended"
    )
    collective_timeout_s: Annotated[float, Field(gt=0, le=LONGEST_S)] = Field(
        60.0, description="seconds for all ranks to arrive at a collective, after the warm-up"
    )


class SweepConfig(Strict):
    """A sweep: the cells to measure, and how they are measured."""

    name: Annotated[str, Field(pattern=_NAME, max_length=200)] = Field(
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
    """Load a config from a file. Raises ConfigError with the file's name, and the line if known."""
    return parse_config(read_config_text(path), str(path))


def read_config_text(path: Path) -> str:
    """Return the text of a YAML file. Raises ConfigError if it cannot be read."""
    try:
        content = _read_at_most(MAX_BYTES + 1, path)
        if len(content) > MAX_BYTES:
            raise ConfigError(
                f"{path}: larger than {MAX_BYTES} bytes", "A config has a few dozen lines"
            )
        return content.decode("utf-8")
    except OSError as error:
        remedy = ""
        siblings = sorted(map(str, path.parent.glob("*.yaml")))
        if isinstance(error, FileNotFoundError) and siblings:
            remedy = suggestion(path.with_suffix(".yaml"), siblings)
        elif isinstance(error, IsADirectoryError):
            remedy = "Name a YAML file, such as configs/demo.yaml"
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", remedy) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: cannot be read: byte {error.start} is not UTF-8", "Save it as UTF-8"
        ) from error


def _read_at_most(size: int, path: Path) -> bytes:
    """Return the first bytes of a file, a pipe such as `<(…)`, or a device.

    Raise OSError, also if nothing is written to a pipe for a while.
    """
    content = b""
    # Without O_NONBLOCK, opening a pipe waits for somebody to write to it.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:
        while len(content) < size:
            if not select.select([file], [], [], _PIPE_S)[0]:
                raise TimeoutError(errno.ETIMEDOUT, f"nothing was written to it for {_PIPE_S:g} s")
            piece = file.read(size - len(content))
            if piece == b"":
                break
            content += piece or b""
    return content


def parse_config(text: str, name: str) -> tuple[SweepConfig, Source]:
    """Return the config in a text. `name` stands for the file in errors. Raises ConfigError."""
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
    # Only a config that is written now is refused for these: an earlier version ran such configs.
    if not config.instruments:
        raise ConfigError(
            f"{source.where(('instruments',))}: is empty: nothing would be measured",
            "Leave it out, or write [timing]",
        )
    if config.env:
        _check_env_size(config.env, source)
    for name in config.env.keys() & _REFUSED.keys():
        problem, remedy = _REFUSED[name]
        raise ConfigError(f"{source.where(('env', name))}: {problem}", remedy)
    for number, grid in enumerate(config.grids):
        for axis in sorted(grid.fixed.keys() & grid.axes.keys()):
            where = source.where(("grids", number, "fixed", axis))
            raise ConfigError(
                f"{where}: is also among the axes of the grid", "Leave one of them out"
            )
    return config, source


def validate_config(document: Values, source: Source) -> SweepConfig:
    """Return the config with these values, from a file or from run.json. Raises ConfigError."""
    try:
        config = SweepConfig.model_validate(document)
    except ValidationError as error:
        raise config_error(error, source, explain_unknown=_explain_unknown) from error
    for number, grid in enumerate(config.grids):
        if grid.task not in all_tasks():
            where = source.where(("grids", number, "task"))
            problem = f"{where}: unknown task {quoted(grid.task)}"
            raise ConfigError(problem, suggestion(grid.task, all_tasks()))
    for number, name in enumerate(config.instruments):
        if name not in instrument_names():
            where = source.where(("instruments", number))
            problem = f"{where}: unknown instrument {quoted(name)}"
            raise ConfigError(problem, suggestion(name, instrument_names()))
    if "nsys" in config.instruments:
        _require_nsys_alone(config.instruments, source)
    if config.env:
        _check_env(config.env, source)
    folder = config.results
    if folder is not None and not (folder.strip() and _is_encodable(folder)):
        where = source.where(("results",))
        raise ConfigError(
            f"{where}: {quoted(folder)} is no folder", "Leave it out for results/<name>"
        )
    return config


def with_instruments(config: SweepConfig, names: Sequence[str]) -> SweepConfig:
    """Return the config with the instruments of `--instrument` added. Raises ConfigError."""
    for name in names:
        if name not in instrument_names():
            problem = f"--instrument: unknown instrument {quoted(name)}"
            raise ConfigError(problem, suggestion(name, instrument_names()))
    instruments = list(dict.fromkeys([*config.instruments, *names]))
    if "nsys" in instruments:
        _require_nsys_alone(instruments, Source("--instrument", None))
    return config.model_copy(update={"instruments": instruments})


def _require_nsys_alone(instruments: Sequence[str], source: Source) -> None:
    # Nsight Systems slows the cell down. It also uses CUPTI, which has one user at a time.
    others = [
        name for name in ("timing", "kernel_time", "kernels", "backend") if name in instruments
    ]
    if others:
        raise ConfigError(
            f"{source.where(('instruments',))}: nsys cannot go with {' or '.join(others)}",
            "Use it in another config: [memory, nsys]",
        )


def _check_env(env: Mapping[str, str], source: Source) -> None:
    # Otherwise no process could be started.
    for name, value in env.items():
        where = source.where(("env", name))
        if not name or "=" in name or not _is_encodable(name):
            raise ConfigError(
                f"{where}: {quoted(name)} cannot name an environment variable", "Write NAME: value"
            )
        if not _is_encodable(value):
            raise ConfigError(
                f"{where}: cannot be the value of an environment variable",
                "Write plain text, without a NUL",
            )


def _check_env_size(env: Mapping[str, str], source: Source) -> None:
    sizes = {name: len(os.fsencode(f"{name}={value}")) for name, value in env.items()}
    for name, size in sizes.items():
        if size > LONGEST_VARIABLE:
            raise ConfigError(
                f"{source.where(('env', name))}: has {size:,} bytes, but a process accepts at most "
                f"{LONGEST_VARIABLE:,} bytes per variable",
                "Put the value into a file",
            )
    whole = sum(sizes.values()) + sum(map(len, assignments(os.environ)))
    allowed = os.sysconf("SC_ARG_MAX") // 2  # the rest is for arguments and for pointers to each
    if whole > allowed:
        raise ConfigError(
            f"{source.where(('env',))}: has {whole:,} bytes together with the environment of this "
            f"process, but a process accepts at most {allowed:,}",
            "Put long values into files",
        )


def _is_encodable(text: str) -> bool:
    """True if the system accepts the text in a path or an environment variable."""
    try:
        return b"\0" not in os.fsencode(text)  # a NUL would end it
    except UnicodeEncodeError:
        return False


def json_schema() -> Values:
    """Return the JSON Schema of a config, with the parameters of every task, for editors."""
    schema = SweepConfig.model_json_schema()
    grid = schema["$defs"]["Grid"]
    grid["properties"]["task"]["enum"] = sorted(all_tasks())
    fixed: Values = {}
    for task in all_tasks().values():
        own = task.params.model_json_schema(by_alias=True)
        schema["$defs"] |= own.pop("$defs", {})
        fixed |= own["properties"]
    mappings = [name for name, axis in fixed.items() if axis.get("type") == "object"]
    lists = {name: {"type": "array", "minItems": 1, "items": axis} for name, axis in fixed.items()}
    either = {name: {"anyOf": [one, fixed[name]]} for name, one in lists.items()}
    # A key of a mapping, such as `model_args.layers`, can have any value.
    closed = {
        "patternProperties": {rf"^({'|'.join(mappings)})\.": {}},
        "additionalProperties": False,
    }
    grid["properties"]["fixed"] |= {"properties": fixed, **closed}
    grid["properties"]["axes"] |= {"properties": either, **closed}
    grid["properties"]["zip"]["items"] |= {"properties": lists, **closed}
    return schema


def _explain_unknown(where: str, place: KeyPath) -> tuple[str, str]:
    name, allowed = str(place[-1]), _allowed_keys(place)
    if "fixed" in allowed and name in all_axes():
        return f"{where}: is an axis", "Put it under fixed, or as a list under axes"
    return explain_unknown_key(allowed, where, place)


def _allowed_keys(place: KeyPath) -> list[str]:
    """Return the keys that are allowed where a path has its last key, which is unknown."""
    models: dict[str, type[BaseModel]] = {"grids": Grid, "limits": Limits, "override": Override}
    keys = list(SweepConfig.model_fields)
    for step in place[:-1]:
        if str(step) in models:
            keys = list(models[str(step)].model_fields)
    return keys
