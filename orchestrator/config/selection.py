"""The part of a sweep that the command line selects: `--set`, `--where` and `--sample`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ruamel.yaml import YAML

from orchestrator.common.errors import ConfigError
from orchestrator.common.hashing import text_digest
from orchestrator.config.yaml_source import plain
from tasks.spec.cell import Cell

_SEVERAL = "Name one or several values as axis=value,value"


@dataclass(frozen=True)
class Selection:
    """What the command line says about a config: `set` narrows or replaces axes, `where` picks cells, and of those `sample`, a
    fraction, is taken at random; `instruments` watch beside those of the config.
    """

    set: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    where: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    sample: float | None = None
    instruments: Sequence[str] = ()

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Selection:
        """Read a stored selection, without the keys that only another version knows."""
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in stored.items() if name in known})


def parse_selection(
    sets: Iterable[str],
    wheres: Iterable[str],
    sample: float | None = None,
    instruments: Iterable[str] = (),
) -> Selection:
    """`--set axis=a,b` and `--where axis=a,axis=b|c`. Values read as in YAML."""
    if sample == 0:
        raise ConfigError(
            "--sample 0%: is a sample of nothing", "Write 10%, or leave it out for all cells"
        )
    conditions = [part for where in wheres for part in where.split(",")]
    return Selection(
        _assignments(sets, ",", "--set"),
        _assignments(conditions, "|", "--where"),
        sample,
        tuple(instruments),
    )


def choose_sample(cells: Iterable[Cell], share: float, seed: int = 0) -> tuple[Cell, ...]:
    """This fraction of them at random, in their order: the same ones each time, and hardly others where some have been added."""
    known = tuple(cells)
    wanted = math.ceil(share * len(known))
    drawn = sorted(known, key=lambda cell: text_digest(f"{seed} {cell.id}"))[:wanted]
    chosen = {cell.id for cell in drawn}
    return tuple(cell for cell in known if cell.id in chosen)


def matches(values: Mapping[str, Any], condition: Mapping[str, Any]) -> bool:
    """Whether a cell's parameters meet every clause; a list of values in a clause matches any of them."""
    return all(
        name in values
        and values[name] in (wanted if isinstance(wanted, list | tuple) else [wanted])
        for name, wanted in condition.items()
    )


def _assignments(texts: Iterable[str], separator: str, option: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for text in texts:
        name, values = _assignment(text, separator, option)
        if name in found:
            raise ConfigError(
                f"{option} {name}: is given twice", f"Join the values with {separator!r}"
            )
        found[name] = values
    return found


def _assignment(text: str, separator: str, option: str) -> tuple[str, list[Any]]:
    name, equals, values = text.partition("=")
    if not equals or not name.strip() or not values.strip():
        raise ConfigError(f"{option} {text}: is not an assignment", _SEVERAL)
    parser = YAML(typ="safe", pure=True)
    try:
        values = values.replace(separator, ",") if separator != "," else values
        return name.strip(), plain(parser.load(f"[{values}]"))
    except Exception as error:  # whatever the parser stumbles over: see config.py
        raise ConfigError(f"{option} {text}: is not YAML", _SEVERAL) from error
