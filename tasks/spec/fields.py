"""Declarations of recorded values: columns of stored tables, and facts of an attempt.

Everything that a reader of results needs to know about a value is declared once, here or in
`tables.py`, `metrics.py`, `facts.py` and `axes.py`. Arrow schemas, the columns of `cells`, their
notation in tables and docs/columns.md are generated from the declarations. This module imports no
torch, pandas or pyarrow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from functools import cache
from string import Formatter
from typing import Annotated, get_args, get_origin, get_type_hints

from tasks.spec.messages import is_utf8


class Dtype(StrEnum):
    """Data type of a stored column."""

    TEXT = "text"
    INT32 = "int32"
    INT64 = "int64"
    FLOAT = "float"
    TIMESTAMP = "timestamp"  # UTC, microseconds
    JSON = "json"  # a JSON object as text
    BOOL = "bool"


class Aggregate(StrEnum):
    """Rule by which several samples of a cell become one value of a column."""

    FIRST = "first"
    MAX = "max"
    SUM = "sum"
    SIZE = "size"  # the number of samples
    SUMMARY = "summary"  # one column per statistic: n, mean, sd, min, median, ci_low, …
    INTERVAL = "interval"  # median, ci_low, ci_high and coverage
    DIFFERENCE = "difference"  # the value of mode `after` less that of mode `before`
    NOTE = "note"  # the note of the first sample


@dataclass(frozen=True)
class Field:
    """A column of a stored table.

    doc: one sentence or noun phrase for docs/columns.md.
    dtype: None if it follows from the annotation (str, int, float).
    required: a row without a value is damaged or was not written by this program.
    values: the values that the column may have, with their meaning; empty if it may have any.
    name: empty until the field is read from its row type with `fields_of`.

    It is declared in the annotation of a dataclass field:
    `total_ns: Annotated[int, Field("total time of all launches", unit="ns")]`
    """

    doc: str
    dtype: Dtype | None = None
    unit: str = ""
    required: bool = False
    values: Mapping[str, str] = field(default_factory=dict)
    name: str = ""


@dataclass(frozen=True)
class Fact:
    """A key of the JSON objects `facts` or `evidence` of an attempt."""

    name: str
    dtype: Dtype
    doc: str
    unit: str = ""


_DTYPES = {str: Dtype.TEXT, int: Dtype.INT64, float: Dtype.FLOAT}


@cache
def fields_of(row: type) -> tuple[Field, ...]:
    """Return the declared columns of a row type, in the order of its dataclass fields.

    Raise TypeError for a dataclass field that declares none.
    """
    assert is_dataclass(row)
    hints = get_type_hints(row, include_extras=True)
    found = []
    for name in (one.name for one in fields(row)):
        if get_origin(hints[name]) is not Annotated:
            problem = f"{row.__name__}.{name} declares no column"
            raise TypeError(f"{problem}: annotate it with Field(...)")
        kind, *extras = get_args(hints[name])
        declared = next(extra for extra in extras if isinstance(extra, Field))
        # The first type of `int | None` decides.
        scalar = (*get_args(kind), kind)[0]
        dtype = _DTYPES[scalar] if declared.dtype is None else declared.dtype
        found.append(replace(declared, name=name, dtype=dtype))
    return tuple(found)


def require_types(record: object) -> None:
    """Raise TypeError for a value of a row that its column cannot hold."""
    row: type = type(record)
    for declared in fields_of(row):
        value = getattr(record, declared.name)
        if value is not None and not _FITS[declared.dtype or Dtype.TEXT](value):
            raise TypeError(f"{declared.name} cannot be {value!r:.80}")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and (value.isascii() or is_utf8(value))


_FITS: Mapping[Dtype, Callable[[object], bool]] = {
    Dtype.TEXT: _is_text,
    Dtype.JSON: _is_text,
    Dtype.INT32: lambda value: type(value) is int and -(2**31) <= value < 2**31,
    Dtype.INT64: lambda value: type(value) is int and -(2**63) <= value < 2**63,
    # Floats hold all integers of 53 bits.
    Dtype.FLOAT: lambda value: (
        type(value) is float or (type(value) is int and -(2**53) <= value < 2**53)
    ),
    Dtype.BOOL: lambda value: type(value) is bool,
}


# Patterns of what the placeholders of a column's name stand for. `{phase}` names a phase of a step,
# `step` itself, or `outside`; `{rank}` counts from 1.
PLACEHOLDERS: Mapping[str, str] = {
    "phase": "[a-z]+",
    "statistic": "n|mean|sd|min|median|ci_low|ci_high|coverage",
    "role": "[a-z_]+",
    "what": "saved|forward|backward",
    "rank": "[0-9]+",
    "when": "before|after",
    "words": "[^:]+",
}


@cache
def name_pattern(template: str) -> re.Pattern[str]:
    """Return a pattern that matches the names for which a template such as `{phase}_ms` stands.

    Each placeholder is a named group. Raise KeyError for an unknown placeholder.
    """
    pattern = ""
    for text, placeholder, _, _ in Formatter().parse(template):
        pattern += re.escape(text)
        if placeholder:
            pattern += f"(?P<{placeholder}>{PLACEHOLDERS[placeholder]})"
    return re.compile(pattern)
