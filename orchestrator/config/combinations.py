"""Combinations of a grid's axes: their product, in which the axes of one zip group advance together.

A factor is the list of values of one axis, or of the axes of one group. The combinations are the
product of the factors. `--set` replaces the values of axes, in a group for all of its axes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import or_

from orchestrator.common.errors import ConfigError
from orchestrator.common.text import counted
from tasks.spec.axes import Values, select

Lists = Mapping[str, Sequence[object]]  # the values of axes
Factor = list[Values]


def grid_factors(axes: Lists, groups: Iterable[Lists], sets: Lists) -> list[Factor]:
    """Return the factors of a grid: their `product` has all combinations.

    groups: axes that advance together. sets: the values of `--set`, which replace those of axes.
    """
    remaining = dict(sets)
    replaced = []
    for group in groups:
        replaced.append({name: remaining.pop(name, values) for name, values in group.items()})
    factors = []
    for group in (*({name: values} for name, values in {**axes, **remaining}.items()), *replaced):
        if group:
            rows = zip(*group.values(), strict=True)
            factors.append([dict(zip(group, row, strict=True)) for row in rows])
    return factors


def include_factors(groups: Iterable[Lists], sets: Lists) -> list[Factor]:
    """Return the factors by which `--set` multiplies each cell of `include`."""
    return grid_factors({}, [select(group, sets) for group in groups], sets)


def product(factors: Sequence[Factor]) -> Iterator[Values]:
    """Yield the values of each combination."""
    for parts in itertools.product(*factors):
        yield reduce(or_, parts, {})


def check_group(where: str, group: Lists, sets: Lists) -> None:
    """Raise ConfigError for a group whose axes cannot advance together.

    where: the place of the group in the config. sets: the values of `--set`.
    """
    _require_one_length(where, group)
    given = select(sets, group)
    left = ", ".join(name for name in group if name not in given)
    if given and left:
        verb = "are" if ", " in left else "is"
        how_many = "both" if len(group) == 2 else "all"
        raise ConfigError(
            f"--set: {left} {verb} zipped with {', '.join(given)}",
            f"Set {how_many}, or use --where",
        )
    _require_one_length("--set", given)


def _require_one_length(where: str, group: Lists) -> None:
    lengths = {name: len(values) for name, values in group.items()}
    first, *others = lengths or ("",)
    for name in others:
        if lengths[name] != lengths[first]:
            values = counted(lengths[first], "value")
            raise ConfigError(
                f"{where}: {first} has {values}, but {name} has {lengths[name]}",
                "The lists of one group must have the same length",
            )
