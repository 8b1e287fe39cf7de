"""How a column is described, or a value that one may have, and a table with all that there is to say of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from string import Formatter

_STANDS_FOR = {
    "phase": "[a-z]+",
    "statistic": "n|mean|sd|min|median|ci_low|ci_high|coverage",
    "kind": "allocated|requested|reserved|rss",
    "role": "[a-z_]+",
    "what": "saved|forward|backward",
    "way": "wide|narrow|library",
    "rank": "[0-9]+",
    "when": "before|after",
    "part": "[a-z0-9_]+",
    "words": "[^:]+",
}


@dataclass(frozen=True)
class Column:
    """Or a value of one. unit: empty where there is none, or where the meaning says it."""

    name: str
    unit: str
    meaning: str

    def describes(self, column: str) -> bool:
        return self._pattern.fullmatch(column) is not None

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        parts = [
            (text, f"(?:{_STANDS_FOR[field]})" if field else "")
            for text, field, *_ in Formatter().parse(self.name)
        ]
        return re.compile("".join(re.escape(text) + several for text, several in parts))


@dataclass(frozen=True)
class Values:
    """Those that a column has, or what its JSON holds by name. of: the instruments, or metrics, whose they are, if not of all."""

    column: str
    values: tuple[Column, ...]
    of: tuple[str, ...] = ()

    def lines(self) -> Iterator[str]:
        of = " and ".join(f"`{one}`" for one in self.of)
        yield from ("", f"`{self.column}` of {of}:" if of else f"`{self.column}`:", "")
        yield from lines_of(self.values, self.column)


@dataclass(frozen=True)
class TableDoc:
    """One of the tables that a run is made of. about: what a row is, and how to read it."""

    name: str
    about: str
    columns: tuple[Column, ...]
    values: tuple[Values, ...] = ()

    def lines(self) -> Iterator[str]:
        yield from ("", f"## {self.name}", "", self.about, "", *lines_of(self.columns, "column"))
        for one in self.values:
            yield from one.lines()


def lines_of(described: Sequence[Column], what: str) -> Iterator[str]:
    """A table in Markdown, without units where there is none. what: is described."""
    in_units = any(one.unit for one in described)
    yield f"| {what} | unit | what it is |" if in_units else f"| {what} | what it is |"
    yield "|---|---|---|" if in_units else "|---|---|"
    for one in described:
        name = f"`{one.name}`" if one.name else "(empty)"
        yield (
            f"| {name} | {one.unit} | {one.meaning} |"
            if in_units
            else f"| {name} | {one.meaning} |"
        )
