"""Draw charts as SVG and PNG with vl-convert, whose JavaScript engine takes seconds to start."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.sax.saxutils import escape

from orchestrator.common.errors import PlatformError
from orchestrator.common.hashing import sha256
from orchestrator.common.user_cache import read_cached, write_cached
from orchestrator.report.charts.theme import with_variables

# Pixels per point: sharp in print.
_PNG_SCALE = 2
_NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?")
# By the standard of XML 1.0; line breaks and tabs are allowed.
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_PICTURES = {chr(code): chr(0x2400 + code) for code in range(0x20)}  # of control characters
_LINK = re.compile(r"</?a\b[^>]*>")
_FONTS = ("/usr/share/fonts", "/usr/local/share/fonts", "~/.fonts", "~/.local/share/fonts")
_FONT_CONFIG = "FONTCONFIG_FILE"


def require_packages() -> None:
    """Raise PlatformError if the package is missing that draws charts. Tables do not need it."""
    if find_spec("vl_convert") is None:
        raise PlatformError(
            "charts need vl-convert-python, not installed here",
            "Run `pip install vl-convert-python`, or print a table alone:"
            " sweep report RUN --table NAME",
        )


@dataclass(frozen=True)
class Picture:
    """A drawn chart: its panels for the page, and all of it for files.

    problem: the reason for a missing drawing, otherwise empty.
    """

    panels: Sequence[str] = ()
    svg: str = ""
    png: bytes = b""
    problem: str = ""


def draw(chart: Sequence[Mapping[str, object]]) -> Picture:
    """Return the picture of a chart: Vega-Lite of its panels, and of the whole as the last."""
    svgs = []
    for spec in map(_drawable, chart):
        svg = _from_cache(spec, lambda own: _converter().vegalite_to_svg(own).encode()).decode()
        svgs.append(with_short_paths(with_numbered_clips(svg)))
    *panels, whole = svgs
    svg = _LINK.sub("", whole)  # the targets of links are on the page
    png = _from_cache((svg, _PNG_SCALE), lambda own: _converter().svg_to_png(own[0], scale=own[1]))
    return Picture(list(map(_for_page, panels)), svg, png)


def _from_cache(source: Any, convert: Callable[[Any], bytes]) -> bytes:
    """Return what a source is converted to, from the cache if it was converted before.

    Drawing takes 40 % of the report of 360 cells; most charts are the same after a few more cells.
    """
    key = sha256(json.dumps([source, _renderer()]))[:32]
    stored = read_cached("pictures", key)
    if stored is not None:
        return zlib.decompress(stored)
    content = convert(source)
    write_cached("pictures", key, zlib.compress(content))
    return content


@cache
def _renderer() -> list[str]:
    """Return what a picture depends on besides its specification: a version and the fonts."""
    return [version("vl-convert-python"), *map(str, _font_folders())]


def _drawable(spec: Any) -> Any:
    """Return a specification in which pictures replace letters that no SVG can hold.

    vl-convert aborts the process at such a letter, which may be in the value of any axis, and at an
    escaped one in the name of a field, which it takes for JavaScript.
    """
    if isinstance(spec, str):
        return _NOT_XML.sub(lambda letter: _PICTURES.get(letter[0], "\ufffd"), spec)
    if isinstance(spec, Mapping):
        return {_drawable(key): _drawable(value) for key, value in spec.items()}
    return list(map(_drawable, spec)) if isinstance(spec, list | tuple) else spec


def _for_page(svg: str) -> str:
    """Return the SVG of a panel for the page: with its links, colours and fonts."""
    # vl-convert makes a relative address absolute.
    svg = re.sub(r'(?:xlink:)?href="[^"#]*#', 'href="#', svg)
    svg = re.sub(r' font-family="[^"]*"| xmlns(:xlink)?="[^"]*"| opacity="1"', "", svg)
    svg = re.sub(r' target="[^"]*"', "", svg)
    # Paths that paint nothing would take 3 % of the page.
    svg = re.sub(r'<path [^>]*d="(M0,0h0v0h0Z)?"[^>]*/>', "", svg)
    return with_variables(svg)


@cache
def _converter() -> Any:
    """Return vl_convert with the machine's fonts, for letters that its Liberation Sans lacks."""
    import vl_convert  # takes seconds and much memory

    before = os.environ.get(_FONT_CONFIG)
    with TemporaryDirectory() as empty:
        folders = [empty, *map(str, _font_folders())]
        listed = "".join(f"<dir>{escape(folder)}</dir>" for folder in folders)
        config = Path(empty, "fonts.conf")
        config.write_text(f"<fontconfig>{listed}</fontconfig>")
        # The variable is read once, when something is drawn for the first time.
        os.environ[_FONT_CONFIG] = str(config)
        try:
            vl_convert.svg_to_png('<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"/>')
        finally:
            del os.environ[_FONT_CONFIG]
            if before is not None:
                os.environ[_FONT_CONFIG] = before
    return vl_convert


def _font_folders() -> list[Path]:
    roots = [Path(os.path.expanduser(root)) for root in _FONTS]
    # Another Liberation Sans would replace the built-in one, and text widths would depend on the
    # machine.
    folders = {font.parent for root in roots for font in root.rglob("*.[ot]t[fc]")}
    return sorted(folder for folder in folders if not any(folder.rglob("Liberation*")))


def with_numbered_clips(svg: str) -> str:
    """Number the clips of an SVG from 0."""
    # Vega counts clips across drawings, so that equal charts would differ.
    names = dict.fromkeys(re.findall(r'id="(clip\d+)"', svg))
    numbered = {name: f"clip{index}" for index, name in enumerate(names)}
    return re.sub(r"\bclip\d+\b", lambda found: numbered.get(found[0], found[0]), svg)


def with_short_paths(svg: str) -> str:
    """Round paths to a tenth of a point."""
    # In a chart with thousands of points, paths are most of the bytes.
    return re.sub(r'(?<= d=")[^"]+', lambda found: _short_path(found[0]), svg)


def _short_path(path: str) -> str:
    """Write a line along an axis as one number, and omit a line of no length."""
    steps: list[str] = []
    here = ["", ""]  # end of the last step; empty if the step does not contain it
    # + 0.0: no -0
    path = _NUMBER.sub(lambda one: f"{round(float(one[0]), 1) + 0.0:.1f}".removesuffix(".0"), path)
    for letter, numbers in re.findall(r"([A-Za-z])([^A-Za-z]*)", path):
        there = numbers.split(",") if letter in "ML" else ["", ""]
        if letter != "L" or (here[0] != there[0] and here[1] != there[1]):
            steps.append(letter + numbers)
        elif here != there:
            steps.append(f"V{there[1]}" if here[0] == there[0] else f"H{there[0]}")
        here = there
    return "".join(steps)
