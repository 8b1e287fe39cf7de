"""What the page holds as data takes few bytes, and its own script, here run by Node.js, gives back all of it."""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import orchestrator.report.page
from orchestrator.report.page.html import _to_json
from orchestrator.report.page.packing import (
    PackedCells,
    packed,
    packed_chart,
    packed_rows,
    packed_samples,
)
from tests.orchestrator.report.page import unpacking

SCRIPT = Path(orchestrator.report.page.__file__).parent / "templates" / "unpacking.js"
Unpack = Callable[
    [str, list[list[Any]]], list[Any]
]  # by what is called in JavaScript, of what it is given at each call


def in_python(function: str, calls: list[list[Any]]) -> list[Any]:
    by_name = {
        "unpacked": unpacking.unpacked,
        "rowsOf": unpacking.rows_of,
        "chartOf": unpacking.chart_of,
        "cellOf": unpacking.cell_of,
        "samplesOf": unpacking.samples_of,
    }
    return [by_name[function](*json.loads(_to_json(call))) for call in calls]


def in_javascript(function: str, calls: list[list[Any]]) -> list[Any]:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node.js")
    program = (
        f"{SCRIPT.read_text()}\nconst calls = JSON.parse(require('fs').readFileSync(0, 'utf8'));\n"
    )
    program += f"console.log(JSON.stringify(calls.map((call) => {function}(...call))));"
    done = subprocess.run(
        [node, "-e", program], input=_to_json(calls), capture_output=True, text=True, check=True
    )
    found: list[Any] = json.loads(done.stdout)
    return found


@pytest.fixture(params=[in_python, in_javascript])
def unpack(request: pytest.FixtureRequest) -> Unpack:
    chosen: Unpack = request.param
    return chosen


def as_json(value: Any) -> Any:
    return json.loads(_to_json(value))


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([0], "A"),
        ([1, 1, 2, 0], "CACF"),
        ([15, 30], "ee"),
        ([16], "gB"),
        ([-16], "hB"),
        ([123456789], "qxmvrH"),
    ],
)
def test_whole_numbers_as_source_maps_have_them(numbers: list[int], text: str) -> None:
    assert packed(numbers) == text


def test_whole_numbers_of_any_size_come_back(unpack: Unpack) -> None:
    draw = random.Random(1)
    numbers = [[draw.randint(-(2**bits), 2**bits) for _ in range(40)] for bits in range(51)]
    assert unpack("unpacked", [[packed(each)] for each in [*numbers, []]]) == [*numbers, []]


ROWS: list[list[list[Any]]] = [
    [],
    [["one", "–"]],
    [["same", text, "–"] for text in "abca"] + [["same", "\"</td>'\n\\", "–"]],
    [[f"{row}.5 ± 0.1†", str(row % 7), str(row // 100)] for row in range(3000)],
]


@pytest.mark.parametrize("rows", ROWS, ids=len)
def test_rows_come_back(rows: list[list[str]], unpack: Unpack) -> None:
    assert unpack("rowsOf", [[packed_rows(rows)]]) == [rows]


def test_a_text_of_many_rows_is_there_once() -> None:
    rows = [["a text of many letters", f"another of {row // 500}"] for row in range(4000)]
    assert len(_to_json(packed_rows(rows))) < 4300  # a letter a row, where not all are the same


def test_the_rows_of_a_chart_come_back_as_they_were(unpack: Unpack) -> None:
    records = [
        {"x": 1, "on": True, "y": 0.25 + place, "of": None if place else "a"} for place in range(5)
    ]
    records.append({"x": True, "on": 1, "y": math.pi, "of": "1"})
    spec = {"mark": "line", "data": {"name": "d"}, "datasets": {"d": records, "none": []}}
    for chart in (spec, {"mark": "line", "datasets": {}}):
        (found,) = unpack("chartOf", [[packed_chart(chart)]])
        assert json.dumps(found) == json.dumps(
            chart
        )  # which tells 1 from true, and the order of the fields
    assert packed_chart({"mark": "line"})["mark"] == "line"


def test_the_numbers_of_samples_come_back_to_the_last_digit(unpack: Unpack) -> None:
    draw = random.Random(2)
    sizes = [10 ** draw.uniform(-9, 13) for _ in range(200)]
    series = [
        (place, [float(f"{size * draw.uniform(0.9, 1.1):.6g}") for _ in range(place % 9 + 1)])
        for place, size in enumerate(sizes)
    ]
    series += [
        (200, [0.1, -0.25, 1e-3]),
        (201, [65028489216.0]),
        (205, [0.0]),
        (206, [1e-22]),
        (207, [123.456] * 3),
    ]
    (found,) = unpack("samplesOf", [[packed_samples(series)]])
    assert found == as_json(series)
    assert packed_samples(series)[-1] == []  # none but had to stay as it is


@pytest.mark.parametrize("odd", [math.nan, math.inf, 1e300, 5e-324, 2.0**51, math.pi * 1e-12])
def test_samples_that_are_no_such_numbers_stay_as_they_are(odd: float, unpack: Unpack) -> None:
    series = [(0, [1.5]), (3, [1.0, odd, 2.0]), (4, [0.25, 0.5])]
    *_, others = packed_samples(series)
    assert [place for place, _ in others] == [3]
    assert unpack("samplesOf", [[packed_samples(series)]]) == [as_json(series)]


def test_a_series_without_values_stays_as_it_is(unpack: Unpack) -> None:
    series = [(0, [1.5]), (3, list[float]()), (4, [0.25])]
    assert packed_samples(series)[-1] == [(3, [])]
    assert unpack("samplesOf", [[packed_samples(series)]]) == [as_json(series)]


def test_rows_of_lists_come_back(unpack: Unpack) -> None:
    rows = [[[1, 2], {"a": 1}], [[1, 2], {"a": 2}], [[], {"a": 1}]]
    assert unpack("rowsOf", [[packed_rows(rows)]]) == [rows]


def test_a_cell_without_samples_comes_back(unpack: Unpack) -> None:
    assert unpack("samplesOf", [[packed_samples([])]]) == [[]]


def a_cell(place: int) -> dict[str, Any]:
    trace = f"Traceback:\n  File x\n  in y\nError: {place}"
    ended = {
        "status": "oom",
        "where": "warm-up / step",
        "started": "2026-11-21 12:58:31",
        "wall_s": 4.2,
    }
    return {
        "cell": f"run:{place}",
        "task": "train_step",
        "status": "ok",
        "parameters": {"size": "large", "year": "2025", "seed": str(place)},
        "attempts": [
            {"number": 1, **ended, "evidence": {"traceback": trace, "asked_bytes": "1,024"}},
            {"number": 2, **ended, "status": "ok", "where": "–", "evidence": {}},
        ],
        "samples": [(0, [1.5, 2.5]), (7, [float(place)])],
        "log": "said\nat the end",
        "by_hand": "",
    }


def test_all_that_is_known_of_cells_comes_back(unpack: Unpack) -> None:
    cells, packing = [a_cell(place) for place in range(3)], PackedCells()
    known = [packing.pack(cell) for cell in cells]
    found = unpack(
        "cellOf",
        [[cell["cell"], each, packing.texts] for cell, each in zip(cells, known, strict=True)],
    )
    assert found == as_json(cells)
    assert [list(cell["parameters"]) for cell in found] == [["size", "year", "seed"]] * 3
    assert len(packing.texts) == len(set(packing.texts))
    assert packing.texts.count("  File x") == 1
