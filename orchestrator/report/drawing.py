"""Charts as SVG and PNG, and the script that shows them on a page.

A browser's engine does it, which keeps what memory it took: for a large report it does so in a process of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, TypeVar

import vl_convert

T = TypeVar("T")

MANY = 2000  # cells, from which on a process of its own is worth the half second that it takes to start
_PNG_SCALE = 2  # pixels a point: sharp in print
_EMBED = "window.vegaEmbed = vegaEmbed;"


@dataclass(frozen=True)
class Picture:
    """problem: why there is none, else empty."""

    svg: str = ""
    png: bytes = b""
    problem: str = ""


def draw(charts: Sequence[Mapping[str, Any]]) -> list[Picture]:
    """Of each chart of Vega-Lite, which holds its data, its picture."""
    return [_draw(chart) for chart in charts]


def _draw(chart: Mapping[str, Any]) -> Picture:
    try:
        svg = numbered_anew(vl_convert.vegalite_to_svg(dict(chart)))
        return Picture(svg, vl_convert.svg_to_png(svg, scale=_PNG_SCALE))
    except Exception as error:
        return Picture(problem=described(error))


def numbered_anew(svg: str) -> str:
    """With its clips counted from 0: Vega counts on from drawing to drawing, so that the same chart would be another file."""
    names = dict.fromkeys(re.findall(r'id="(clip\d+)"', svg))
    places = {name: f"clip{place}" for place, name in enumerate(names)}
    return re.sub(r"\bclip\d+\b", lambda found: places.get(found[0], found[0]), svg)


def described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def script_of_charts() -> str:
    """For a page that asks for nothing else. To bundle it takes seconds."""
    script: str = vl_convert.javascript_bundle(_EMBED)
    return script


def here_or_apart(cells: int, work: Callable[..., T], *given: object) -> T:
    """What `work` makes of what it is given, in a process of its own where there are many cells."""
    if cells < MANY:
        return work(*given)
    with ProcessPoolExecutor(1, get_context("spawn")) as apart:
        return apart.submit(work, *given).result()
