"""The part of a sweep that the command line selects: `--set`, `--where` and `--sample`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.common.errors import ConfigError
from orchestrator.common.hashing import sha256
from orchestrator.common.text import shell_word
from orchestrator.config.hints import LONGEST_VALUE
from orchestrator.config.yaml_source import load_yaml, plain
from tasks.spec.axes import Values, leave_out, select_fields
from tasks.spec.cell import Cell
from tasks.spec.messages import shorten

CELL = "cell"  # in a condition: the id of a cell
TOKENS = "tokens_per_update"  # in a condition: micro-batch x accumulation x context length
# How each option is written, by the separator of its values.
_FORMS = {
    ",": "Name one or several values as axis=value,value",
    "|": "Name one value as axis=value, or several as 'axis=value|value'",
}
# A comma in front of a further value, and not of the next condition.
_COMMA_OF_VALUES = re.compile(r",(?=[^=,]+(?:,|$))")


@dataclass(frozen=True)
class Selection:
    """The options of the command line that select cells of a config.

    set: values that replace those of an axis. where: conditions on cells. sample: the fraction of
    the matching cells to take at random. instruments: used in addition to the config's.
    skip_refused: leave out combinations that their task refuses, which are errors otherwise.
    """

    set: Mapping[str, Sequence[object]] = field(default_factory=dict)
    where: Mapping[str, Sequence[object]] = field(default_factory=dict)
    sample: float | None = None
    instruments: Sequence[str] = ()
    skip_refused: bool = False

    def to_json(self) -> Values:
        """Return the selection as run.json stores it."""
        stored = leave_out(vars(self), () if self.skip_refused else ("skip_refused",))
        as_json: Values = json.loads(json.dumps(stored))  # with lists instead of tuples
        return as_json

    @classmethod
    def from_json(cls, stored: Values) -> Selection:
        """Read a stored selection, without the keys that only another version has."""
        return cls(**select_fields(cls, stored))


def parse_selection(
    sets: Iterable[str],
    wheres: Iterable[str],
    sample: float | None = None,
    instruments: Iterable[str] = (),
) -> Selection:
    """Parse `--set axis=a,b` and `--where axis=a,axis=b|c`. Values are YAML. Raises ConfigError."""
    if sample == 0:
        raise ConfigError("--sample 0%: selects no cell", "Write 10%, or leave it out")
    conditions: list[str] = []
    for where in wheres:
        conditions += _conditions(where)
    return Selection(
        _assignments(sets, ",", "--set"),
        _assignments(conditions, "|", "--where"),
        sample,
        tuple(instruments),
    )


def choose_sample(cells: Iterable[Cell], share: float, seed: int = 0) -> tuple[Cell, ...]:
    """Return a fraction of the cells, chosen at random, in their order.

    The same cells are chosen each time, and most of them also after some cells were added.
    """
    known = tuple(cells)
    # Ordered by a digest of each cell, so that an added cell does not change the order of others.
    shuffled = sorted(known, key=lambda cell: sha256(f"{seed} {cell.id}"))
    chosen = set(shuffled[: math.ceil(share * len(known))])
    return tuple(cell for cell in known if cell in chosen)


def matches(values: Mapping[str, object], condition: Mapping[str, object]) -> bool:
    """True if the values meet a condition, in which a list stands for any of its values.

    A name such as `model_args.layers` is that of a key in a mapping.
    """
    for name, wanted in condition.items():
        allowed = wanted if isinstance(wanted, list | tuple) else [wanted]
        axis, _, key = name.partition(".")
        held = values.get(axis) if key else values
        if not isinstance(held, Mapping) or (key or axis) not in held:
            return False
        if held[key or axis] not in allowed:
            return False
    return True


def _conditions(where: str) -> list[str]:
    """Return the conditions of one `--where`. Raise ConfigError for `axis=a,b`."""
    # A comma separates the values of --set, and is often written here too.
    corrected = _COMMA_OF_VALUES.sub("|", where)
    if corrected != where and "=" in where.partition(",")[0]:
        remedy = f"Separate the values of one axis by |: --where {shell_word(corrected)}"
        problem = f"--where {shorten(where, LONGEST_VALUE)}: a comma separates conditions"
        raise ConfigError(problem, remedy)
    return where.split(",")


def _assignments(texts: Iterable[str], separator: str, option: str) -> dict[str, list[object]]:
    parsed: dict[str, list[object]] = {}
    for text in texts:
        name, _, values = map(str.strip, text.partition("="))
        if not name or not values:
            raise ConfigError(
                f"{option} {shorten(text, LONGEST_VALUE)}: is not an assignment", _FORMS[separator]
            )
        if name in parsed:
            raise ConfigError(
                f"{option} {name}: is given twice", f"Join the values with {separator!r}"
            )
        if name == CELL:  # an id such as 12e4 would be a number in YAML
            parsed[name] = [*values.split(separator)]
            continue
        listed = f"[{values.replace(separator, ',')}]"
        document = load_yaml(listed, f"{option} {name}", has_lines=False)
        try:
            parsed[name] = plain(document)
        except TypeError as error:
            raise ConfigError(f"{option} {name}: {error}", _FORMS[separator]) from error
    return parsed
