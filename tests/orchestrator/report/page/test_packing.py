"""Tests of the page's packed data: it is small, safe within HTML, and both Python and JavaScript read it."""

from __future__ import annotations

import base64
import gzip
import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import orchestrator.report.page
from orchestrator.report.page.packing import packed

SCRIPT = Path(orchestrator.report.page.__file__).parent / "templates" / "report.js"
VALUES: list[Any] = [
    [],
    {"log": "</script> “–” \u2028"},
    [[f"{row}.5 ± 0.1†", str(row % 7)] for row in range(3000)],
    {"on": True, "count": 1, "share": 0.1, "none": None},
]


def unpack(text: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(text)))


@pytest.mark.parametrize("value", VALUES, ids=["empty", "markup", "rows", "types"])
def test_packed_data_is_unpacked_unchanged(value: Any) -> None:
    assert unpack(packed(value)) == value


def test_packed_data_is_safe_within_html_and_reproducible() -> None:
    text = packed(VALUES)
    assert not set(text) & set("<>&'\"")
    assert packed(VALUES) == text


def test_repeated_values_take_few_bytes() -> None:
    rows = [["a text of many letters", f"another of {row // 500}"] for row in range(4000)]
    assert len(packed(rows)) < 2000


def test_a_number_that_is_not_finite_is_null() -> None:
    assert unpack(packed([1.0, math.nan, math.inf])) == [1.0, None, None]


def test_the_script_of_the_page_unpacks_the_same_values() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node.js")
    source = SCRIPT.read_text()
    start = source.index("async function unpack")
    function = source[start : source.index("\n}\n", start) + 2]
    program = (
        f"{function}\nconst texts = JSON.parse(require('fs').readFileSync(0, 'utf8'));\n"
        "Promise.all(texts.map((textContent) => unpack({ textContent })))"
        ".then((values) => console.log(JSON.stringify(values)));"
    )
    texts = json.dumps([packed(value) for value in VALUES])
    done = subprocess.run(
        [node, "-e", program], input=texts, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == VALUES
