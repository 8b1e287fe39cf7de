"""Choice of panels for a chart that would have too many.

Repetitions of another run are removed first. Each value of the first axis, such as the size, then
gets equally many panels: preferably those that most other values have too, so that they can be
compared, and of these the most different ones.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any

import pandas as pd

from orchestrator.analysis.axes import RUN, value_ranks

# A chart with more panels is longer than a screen, and each panel is too small to compare.
MOST_PANELS = 12

# Sort key of a panel: the position of its value on each axis except the run, and a number.
Positions = tuple[int, ...]


@dataclass(frozen=True)
class PanelChoice:
    """Panels to draw.

    chosen: their labels. note: how many of how many, and by which rule; empty if all are drawn.
    """

    chosen: frozenset[Any]
    note: str = ""


@dataclass(frozen=True)
class Shown:
    """The content of panels by label.

    amount: panels that show more are preferred. marks: empty if a panel is one cell.
    """

    amount: Mapping[Any, float]
    marks: Mapping[Any, frozenset[Any]] = field(default_factory=dict)


def choose_panels(
    panels: pd.DataFrame, axes: Sequence[str], shown: Shown, plural: str = "panels"
) -> PanelChoice:
    """Return the panels to draw. A panel is a repetition if an earlier run shows the same.

    panels: one row for each panel, with the varying axes. plural: the noun for the note.
    """
    if len(panels) <= MOST_PANELS:
        return PanelChoice(frozenset(panels.index))
    other_axes = [axis for axis in axes if axis != RUN] or list(axes)
    labels = _without_repetitions(panels, other_axes, shown.marks)
    rules = ["none that repeats another run's"] if len(labels) < len(panels) else []
    chosen = list(labels)
    if len(labels) > MOST_PANELS:
        chosen = _equally_many({key: shown.amount[label] for key, label in labels.items()})
        if len({key[0] for key in labels}) <= MOST_PANELS:
            rules.append(f"equally many of each {other_axes[0]}")
        rules.append("the most different first")
    count = f"{len(chosen)} of {len(panels)} {plural}"
    note = f"{count}: {', '.join(rules)}; the tables have the others"
    return PanelChoice(frozenset(labels[key] for key in chosen), note)


def _without_repetitions(
    panels: pd.DataFrame, axes: Sequence[str], marks: Mapping[Any, frozenset[Any]]
) -> dict[Positions, Any]:
    """Return the labels of panels with a mark that no earlier panel with equal axes has."""
    known: dict[Positions, list[frozenset[Any]]] = defaultdict(list)
    labels: dict[Positions, Any] = {}
    columns = [value_ranks(axis, panels[axis]) for axis in axes]
    for key, label in zip(zip(*columns, strict=True), panels.index, strict=True):
        earlier, own = known[key], marks.get(label, frozenset())
        if not earlier or own - frozenset().union(*earlier):
            # Numbered downwards: the earliest panel shows most, and the last in order comes first.
            labels[(*key, -len(earlier))] = label
            earlier.append(own)
    return labels


def _equally_many(amounts: Mapping[Positions, float]) -> list[Positions]:
    """Return one panel of each value of the first axis, then another one, while all of them fit."""
    by_value: dict[int, list[Positions]] = defaultdict(list)
    rank = {group: index for index, group in enumerate(_groups_by_size(amounts))}
    for key in sorted(amounts, key=lambda key: rank[key[1:]]):
        by_value[key[0]].append(key)
    chosen: list[Positions] = []
    for turn in _in_turns(by_value.values()):
        if len(chosen) + len(turn) > MOST_PANELS:
            break
        chosen += turn
    return chosen or _spread(amounts)[:MOST_PANELS]  # not even one of each value fits


def _groups_by_size(amounts: Mapping[Positions, float]) -> list[Positions]:
    """Return groups of panels that agree in all but the first axis, those of most values first."""
    totals: dict[Positions, float] = defaultdict(float)
    for key, amount in amounts.items():
        totals[key[1:]] += amount
    by_size: dict[int, dict[Positions, float]] = defaultdict(dict)
    for group, size in Counter(key[1:] for key in amounts).items():
        by_size[size][group] = totals[group]
    in_order = [_spread(by_size[size]) for size in sorted(by_size, reverse=True)]
    return list(chain(*in_order))


def _spread(amounts: Mapping[Positions, float], axis: int = 0) -> list[Positions]:
    """Return the panels of each value in turns, so that the first few differ most."""
    if len(amounts) < 2:
        return list(amounts)
    by_value: dict[int, dict[Positions, float]] = defaultdict(dict)
    for key, amount in amounts.items():
        by_value[key[axis]][key] = amount
    values = sorted(by_value)
    # The last value first: a whole step, the narrowest precision, the largest size. Then the
    # opposite end. Sorting is stable, so that this order counts among equal amounts.
    values = [*values[-1:], *values[:-1]]
    values.sort(key=lambda value: max(by_value[value].values()), reverse=True)
    return list(chain(*_in_turns(_spread(by_value[value], axis + 1) for value in values)))


def _in_turns(lists: Iterable[Sequence[Positions]]) -> Iterator[list[Positions]]:
    """Yield the first entries of all lists, then the second ones."""
    for turn in zip_longest(*lists):
        yield [key for key in turn if key is not None]
