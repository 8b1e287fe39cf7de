"""What the page holds as data, in a third of the bytes. unpacking.js gives it back as it was.

Not compressed: what a compressor makes of the same data differs from one version of it to the next, and so would the page.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from orchestrator.report.page.cell_details import Series

_LETTERS = np.frombuffer(
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", dtype=np.uint8
)
_BITS = 5  # of a number in each letter; the sixth says that there are more
_SHIFTS = np.arange(0, 60, _BITS)
_LARGEST = (
    2.0**50
)  # of what is packed: the difference of two, and its sign, is still a whole number to JavaScript
_TENS = np.array(
    [float(f"1e{decimals}") for decimals in range(23)]
)  # a larger power is no longer exact

Column = tuple[
    list[Any], str
]  # its different values, and of each row the place among them; none where they are all the same
Rows = tuple[int, list[Column]]  # how many, and their columns
PackedSamples = tuple[str, str, str, str, list[Series]]


def packed(numbers: npt.ArrayLike) -> str:
    """Whole numbers, each as its difference from the one before it, in the base-64 VLQ that source maps use."""
    differences = np.array(numbers, dtype=np.int64)
    differences[1:] -= differences[:-1].copy()
    signed = (2 * np.abs(differences) + (differences < 0))[:, np.newaxis] >> _SHIFTS
    more = signed >= 1 << _BITS
    letters = _LETTERS[(signed & ((1 << _BITS) - 1)) | (more << _BITS)]
    return str(letters[(signed > 0) | (_SHIFTS == 0)].tobytes(), "ascii")


def packed_rows(rows: Sequence[Sequence[Any]]) -> Rows:
    """By column, since in each the same values come again and again."""
    return len(rows), [_column(values) for values in zip(*rows, strict=True)]


def _column(values: Sequence[Any]) -> Column:
    keys = [_key(value) for value in values]
    different = dict(zip(reversed(keys), reversed(values), strict=True))
    places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    return [different[key] for key in places], packed([places[key] for key in keys]) if len(
        places
    ) > 1 else ""


def _key(value: Any) -> tuple[type, Any]:
    """True, 1 and 1.0 are one key of a dictionary, but not the same in JSON."""
    return type(value), value if isinstance(value, Hashable) else repr(value)


def packed_chart(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A chart of Vega-Lite, with each of its data sets as the names of the fields and the rows."""
    return {
        **spec,
        "datasets": {
            name: _packed_records(records) for name, records in spec.get("datasets", {}).items()
        },
    }


def _packed_records(records: Sequence[Mapping[str, Any]]) -> tuple[list[str], Rows]:
    fields = list(dict.fromkeys(chain.from_iterable(records)))
    return fields, packed_rows([[record.get(field) for field in fields] for record in records])


class PackedCells:
    """What is known of cells, with each text as its place in `texts`, which are all there once the last cell is packed.

    Evidence is such places line by line, since tracebacks differ in few of theirs. A log is as it is: it differs in most.
    """

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    @property
    def texts(self) -> list[str]:
        return list(self._places)

    def pack(self, cell: Mapping[str, Any]) -> list[Any]:
        """As `cellOf` of unpacking.js takes it."""
        return [
            self._place(cell["task"]),
            self._place(cell["status"]),
            [self._place(text) for text in chain.from_iterable(cell["parameters"].items())],
            [self._attempt(attempt) for attempt in cell["attempts"]],
            packed_samples(cell["samples"]),
            cell["log"],
            cell["by_hand"],
        ]

    def _attempt(self, attempt: Mapping[str, Any]) -> list[Any]:
        evidence = [
            [self._place(text) for text in (name, *said.split("\n"))]
            for name, said in attempt["evidence"].items()
        ]
        status, where = self._place(attempt["status"]), self._place(attempt["where"])
        return [attempt["number"], status, where, attempt["started"], attempt["wall_s"], evidence]

    def _place(self, text: str) -> int:
        return self._places.setdefault(text, len(self._places))


def packed_samples(samples: Sequence[Series]) -> PackedSamples:
    """The places of the series, how many values each has, with how many decimals, and the values without their points.

    Last, as they are, the series that are empty, or of which a value is not finite or has too many digits for that.
    """
    full = [series for series in samples if series[1]]
    places = np.array([place for place, _ in full], dtype=np.int64)
    counts = np.array([len(values) for _, values in full], dtype=np.int64)
    numbers = np.array([value for _, values in full for value in values], dtype=np.float64)
    decimals = _decimals(numbers, counts)
    fits = decimals < len(_TENS)
    kept = np.repeat(fits, counts)
    whole = np.rint(numbers[kept] * np.repeat(_TENS[decimals[fits]], counts[fits]))
    others = [series for series in samples if not series[1]]
    others += [series for series, is_packed in zip(full, fits, strict=True) if not is_packed]
    return packed(places[fits]), packed(counts[fits]), packed(decimals[fits]), packed(whole), others


def _decimals(
    numbers: npt.NDArray[np.float64], counts: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Of each series the fewest with which all of its numbers are exact; one more than there may be where none are enough."""
    begins = np.cumsum(counts) - counts
    found = np.full(len(counts), len(_TENS))
    with np.errstate(invalid="ignore", over="ignore"):
        for decimals, scale in enumerate(_TENS):
            if (found < len(_TENS)).all():
                break
            whole = np.rint(numbers * scale)
            exact = np.logical_and.reduceat(
                (whole / scale == numbers) & (np.abs(whole) <= _LARGEST), begins
            )
            found[exact & (found > decimals)] = decimals
    return found
