"""What unpacking.js does, for tests that look at what a page holds. test_packing.py compares the two."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


def unpacked(text: str) -> list[int]:
    numbers, signed, shift = [0], 0, 0
    for letter in text:
        value = LETTERS.index(letter)
        signed, shift = signed + ((value & 31) << shift), shift + 5
        if value < 32:
            numbers.append(numbers[-1] + (-(signed >> 1) if signed & 1 else signed >> 1))
            signed, shift = 0, 0
    return numbers[1:]


def rows_of(packed: Any) -> list[list[Any]]:
    count, columns = packed
    places = [unpacked(text) or [0] * count for _, text in columns]
    return [
        [values[of[row]] for (values, _), of in zip(columns, places, strict=True)]
        for row in range(count)
    ]


def chart_of(spec: dict[str, Any]) -> dict[str, Any]:
    datasets = {
        name: [dict(zip(fields, row, strict=True)) for row in rows_of(rows)]
        for name, (fields, rows) in spec["datasets"].items()
    }
    return {**spec, "datasets": datasets}


def cell_of(cell: str, known: Any, texts: list[str]) -> dict[str, Any]:
    task, status, parameters, attempts, samples, log, by_hand = known
    pairs = [texts[place] for place in parameters]
    return {
        "cell": cell,
        "task": texts[task],
        "status": texts[status],
        "parameters": dict(zip(pairs[::2], pairs[1::2], strict=True)),
        "attempts": [
            {
                "number": number,
                "status": texts[ended],
                "where": texts[where],
                "started": started,
                "wall_s": wall_s,
                "evidence": {
                    texts[name]: "\n".join(texts[line] for line in lines)
                    for name, *lines in evidence
                },
            }
            for number, ended, where, started, wall_s, evidence in attempts
        ],
        "samples": samples_of(samples),
        "log": log,
        "by_hand": by_hand,
    }


def samples_of(packed: Any) -> list[list[Any]]:
    places, counts, decimals, values = map(unpacked, packed[:4])
    ends = [sum(counts[:place]) for place in range(len(counts) + 1)]
    series = [
        [place, [value / 10**tens for value in values[begin:end]]]
        for place, tens, (begin, end) in zip(places, decimals, pairwise(ends), strict=True)
    ]
    return sorted([*series, *packed[4]], key=lambda one: int(one[0]))
