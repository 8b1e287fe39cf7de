"""Labels of cells for people: the task, and the axes in which the cells of a sweep differ.

A key of a mapping is shown alone (`n_layer=6`), and what is named by a path by its last part
(`model=Gpt` for `mine.models:Gpt`), unless that would make two of them look alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain

from orchestrator.common.text import CLASS_NAME, KEY_NAME, short_names, value_text
from tasks.spec.axes import FrozenValues, select
from tasks.spec.cell import Cell, dotted_values, varying_names
from tasks.spec.messages import assignments, escape_unprintable, shorten
from tasks.spec.parameters import computes_own_attention, default_values

_LONGEST_VALUE = 60  # letters
_LONGEST_LINE = 98  # columns, and two for the ellipsis
# What decides time and memory: shown also where it is the default.
_MAIN_AXES = ("model", "size", "context_length", "batch_size", "attention", "precision")


class CellLabels:
    """The label of each cell of a sweep. axis: shown even where all cells have the same value."""

    def __init__(self, cells: Iterable[Cell], axis: str = "") -> None:
        by_task: dict[str, list[Cell]] = {}
        for cell in cells:
            by_task.setdefault(cell.task, []).append(cell)
        self._titles: dict[str, dict[str, str]] = {}
        texts: set[str] = set()
        for task, members in by_task.items():
            varying = varying_names([cell.params.non_default for cell in members])
            axes = [name for name in default_values(type(members[0].params)) if name in varying]
            if axis and axis not in axes:
                axes.append(axis)
            # The values of these axes that are not the default.
            rows = [dotted_values(select(cell.params.non_default, axes)) for cell in members]
            given = set(chain.from_iterable(rows))
            names = [name for one in axes for name in _expanded(one, given, rows)]
            self._titles[task] = short_names(names, KEY_NAME)
            for row in rows:
                texts.update(value for value in row.values() if isinstance(value, str))
        self._short = short_names(texts, CLASS_NAME)

    def __call__(self, cell: Cell) -> str:
        return " ".join([cell.task, *assignments(self.values(cell))])

    def values(self, cell: Cell) -> dict[str, str]:
        """Return the values of a cell that its label has, by their titles."""
        values = dotted_values(cell.params.values())
        texts = {}
        for name, title in self._titles[cell.task].items():
            value = values.get(name)
            if value is not None:
                text = self._short.get(str(value), str(value))
                texts[escape_unprintable(title)] = escape_unprintable(shorten(text, _LONGEST_VALUE))
        return texts


def shared_settings(cells: Sequence[Cell], chosen: Iterable[str] = ()) -> str:
    """Return the settings that all cells have in common in one line, which their labels leave out.

    chosen: axes that come first and are never left out, such as those of `--set`. Then come those
    that decide time and memory, and others that are not the default.
    """
    # Of thousands of cells, only what is not the default is read: cells of one task have the same
    # defaults.
    examples: dict[str, Cell] = {}
    for cell in cells:
        examples.setdefault(cell.task, cell)
    rows = [dotted_values(cell.params.values()) for cell in examples.values()]
    given = [dotted_values(cell.params.non_default) for cell in cells]
    varying = set(varying_names(given))
    line = "all cells:"
    always = len(set(chosen))
    for position, name in enumerate(dict.fromkeys([*chosen, *_MAIN_AXES, *given[0]])):
        value = rows[0].get(name)
        is_shared = value is not None and all(row.get(name) == value for row in rows)
        is_unused = name == "attention" and computes_own_attention(rows[0].get("model"))
        if not is_shared or is_unused or name in varying:
            continue
        word = escape_unprintable(f" {name}={shorten(value_text(value), _LONGEST_VALUE)}")
        if position >= always and len(line + word) > _LONGEST_LINE:
            return f"{line} …"
        line += word
    return line if "=" in line else f"{line} nothing in common"


def _expanded(axis: str, given: Collection[str], rows: Sequence[FrozenValues]) -> list[str]:
    """Return an axis, or the keys of its mappings that have several values."""
    prefix = f"{axis}."
    if not any(name.startswith(prefix) for name in given):
        return [axis]
    return [name for name in varying_names(rows) if name.startswith(prefix)]
