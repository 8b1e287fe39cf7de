"""Which panels of a picture are drawn where there are more than anybody reads.

What another run repeats goes first, all of it. Of what remains each value of the first axis, such as the size, has as many panels
as fit: those that most of the other values have too, so that they can be compared, and of these the ones that differ most.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import pandas as pd

from orchestrator.analysis.axes import places_in_order

MOST_PANELS = 12
_RUN = "run"  # the axis that `orchestrator.store.run_collection` adds

Places = tuple[
    int, ...
]  # of a panel: of its value of each axis but the run, in the order of that one's values, and its number


@dataclass(frozen=True)
class Choice:
    """chosen: the labels of the panels that are drawn. said: how many of how many and by what rule, empty where these are all."""

    chosen: frozenset[Any]
    said: str = ""


@dataclass(frozen=True)
class Shown:
    """What panels show, by their labels. much: the more, the rather one is drawn. marks: none where a panel is one cell."""

    much: Mapping[Any, float]
    marks: Mapping[Any, frozenset[Any]] = field(default_factory=dict)


def choose_panels(
    panels: pd.DataFrame, axes: Sequence[str], shown: Shown, called: str = "panels"
) -> Choice:
    """panels: one row each, in which the axes vary. What an earlier one shows as well of another run is a repetition.

    called: what a panel is, in the plural.
    """
    if len(panels) <= MOST_PANELS:
        return Choice(frozenset(panels.index))
    apart = [axis for axis in axes if axis != _RUN] or list(axes)
    labels = _different(panels, apart, shown.marks)
    chosen = list(labels)
    rules = ["none that repeats another run's"] if len(labels) < len(panels) else []
    if len(labels) > MOST_PANELS:
        chosen = _as_many_of_each({places: shown.much[label] for places, label in labels.items()})
        one_of_each_fits = len({places[0] for places in labels}) <= MOST_PANELS
        rules.append(
            f"as many {f'of each {apart[0]} ' if one_of_each_fits else ''}as fit, the most different first"
        )
    said = (
        f"{len(chosen)} of {len(panels)} {called}: {', '.join(rules)}; the tables have the others"
    )
    return Choice(frozenset(labels[places] for places in chosen), said)


def _different(
    panels: pd.DataFrame, axes: Sequence[str], marks: Mapping[Any, frozenset[Any]]
) -> dict[Places, Any]:
    """The labels of those that have a mark which no earlier one has that agrees with it in these axes.

    Those that agree are numbered downwards: the earliest, which shows most, is then the last in order.
    """
    known: dict[Places, list[frozenset[Any]]] = defaultdict(list)
    labels: dict[Places, Any] = {}
    values = zip(*(places_in_order(axis, panels[axis]) for axis in axes), strict=True)
    for places, label in zip(values, panels.index, strict=True):
        earlier, own = known[places], marks.get(label, frozenset())
        if not earlier or own - frozenset().union(*earlier):
            labels[(*places, -len(earlier))] = label
            earlier.append(own)
    return labels


def _as_many_of_each(shows: Mapping[Places, float]) -> list[Places]:
    """By turns one panel of each value of the first axis, as long as all that are left to take their turn have room."""
    of_each: dict[int, list[Places]] = {}
    rank = {kind: place for place, kind in enumerate(_kinds(shows))}
    for places in sorted(shows, key=lambda places: rank[places[1:]]):
        of_each.setdefault(places[0], []).append(places)
    chosen: list[Places] = []
    for turn in zip_longest(*of_each.values()):
        taken = _known(turn)
        if len(chosen) + len(taken) > MOST_PANELS:
            break
        chosen += taken
    return chosen or _spread(shows)[:MOST_PANELS]  # where not even one of each fits


def _kinds(shows: Mapping[Places, float]) -> list[Places]:
    """Of panels that agree in all but the first axis. Those come first which most of its values have."""
    in_all: dict[Places, float] = defaultdict(float)
    for places, much in shows.items():
        in_all[places[1:]] += much
    known_of = Counter(places[1:] for places in shows)
    alike = [
        {kind: in_all[kind] for kind in known_of if known_of[kind] == often}
        for often in sorted(set(known_of.values()))
    ]
    return [kind for kinds in reversed(alike) for kind in _spread(kinds)]


def _spread(shows: Mapping[Places, float], axis: int = 0) -> list[Places]:
    """By turns one of each value of an axis, each value's spread over the next axis: the first few differ as much as they can.

    The value comes first of which one shows most.
    """
    if len(shows) < 2:
        return list(shows)
    of_each: dict[int, dict[Places, float]] = defaultdict(dict)
    for places, much in shows.items():
        of_each[places[axis]][places] = much
    values = sorted(
        _ends_first(sorted(of_each)), key=lambda value: max(of_each[value].values()), reverse=True
    )
    return [
        places
        for turn in zip_longest(*(_spread(of_each[value], axis + 1) for value in values))
        for places in _known(turn)
    ]


def _ends_first(values: list[int]) -> list[int]:
    """The ends say most of an axis, and the last more than the first: a whole step, the narrowest precision, the largest."""
    return [*values[-1:], *values[:-1]]


def _known(turn: Iterable[Places | None]) -> list[Places]:
    return [places for places in turn if places is not None]
