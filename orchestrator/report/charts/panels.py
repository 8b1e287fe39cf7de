"""PanelChoice of panels for a chart that would have too many.

Repetitions of another run are removed first. Each value of the first axis, such as the size,
then gets as many panels as fit: preferably those that most other values have too, so that they
can be compared, and of these the most different ones.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import pandas as pd

from orchestrator.analysis.axes import places_in_order

# A chart with more panels is longer than a screen, and each panel is too small to compare.
MOST_PANELS = 12
_RUN = "run"  # the axis that `orchestrator.store.run_collection` adds

# Sort key of a panel: the position of its value on each axis except the run, and a number.
Places = tuple[int, ...]


@dataclass(frozen=True)
class PanelChoice:
    """Chosen panels. chosen: labels of the panels to draw. note: how many of how many, and by
    which rule; empty for all.
    """

    chosen: frozenset[Any]
    note: str = ""


@dataclass(frozen=True)
class Shown:
    """The content of panels by label. much: panels with more are preferred. marks: empty if a
    panel is one cell.
    """

    much: Mapping[Any, float]
    marks: Mapping[Any, frozenset[Any]] = field(default_factory=dict)


def choose_panels(
    panels: pd.DataFrame, axes: Sequence[str], shown: Shown, called: str = "panels"
) -> PanelChoice:
    """Return the panels to draw. A panel is a repetition if an earlier one shows the same for
    another run.

    panels: one row for each panel, with the varying axes. called: the plural noun for the
    panels.
    """
    if len(panels) <= MOST_PANELS:
        return PanelChoice(frozenset(panels.index))
    apart = [axis for axis in axes if axis != _RUN] or list(axes)
    labels = _different(panels, apart, shown.marks)
    chosen = list(labels)
    rules = ["none that repeats another run's"] if len(labels) < len(panels) else []
    if len(labels) > MOST_PANELS:
        chosen = _as_many_of_each({places: shown.much[label] for places, label in labels.items()})
        one_of_each_fits = len({places[0] for places in labels}) <= MOST_PANELS
        of_each = f"of each {apart[0]} " if one_of_each_fits else ""
        rules.append(f"as many {of_each}as fit, the most different first")
    note = (
        f"{len(chosen)} of {len(panels)} {called}: {', '.join(rules)}; the tables have the others"
    )
    return PanelChoice(frozenset(labels[places] for places in chosen), note)


def _different(
    panels: pd.DataFrame, axes: Sequence[str], marks: Mapping[Any, frozenset[Any]]
) -> dict[Places, Any]:
    """Return the labels of panels with a mark that no earlier panel with equal axes has.

    Equal panels are numbered downwards: the earliest, which shows most, is the last in order.
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
    """Return panels of the values of the first axis in rotation, while there is room for another
    round.
    """
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
    """Return groups of panels that agree in all but the first axis; groups with most values come
    first.
    """
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
    """Return the panels of each value in rotation, spread over the next axis, so that the first
    few differ most.

    Values come in the order of how much their panels show.
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
    """Return values from both ends inwards, the last first: a whole step, the narrowest
    precision, the largest size.
    """
    return [*values[-1:], *values[:-1]]


def _known(turn: Iterable[Places | None]) -> list[Places]:
    return [places for places in turn if places is not None]
