"""Drawing charts: the size of their pictures, and letters that need a font of the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.report.charts import rendering
from orchestrator.report.charts.rendering import draw, with_short_paths
from tests.conftest import ROOT


@pytest.mark.parametrize(
    ("path", "short"),
    [
        ("", ""),
        ("M0,155.185L50.199,140.374", "M0,155.2L50.2,140.4"),
        ("M1.04,2L1.04,3.5L2.26,3.51L2.31,3.52L-0.04,7", "M1,2V3.5H2.3L0,7"),
        ("M0,0L0,5L0,5ZM0,5L0,6L0,0Z", "M0,0V5ZM0,5V6V0Z"),
        (
            "M175.375,1.887379141862766e-14h51.75v58.303654906594524h-51.75Z",
            "M175.4,0h51.8v58.3h-51.8Z",
        ),
        ("M2.739,0A2.739,2.739,0,1,1,-2.739,0L2.739,0L5,0", "M2.7,0A2.7,2.7,0,1,1,-2.7,0L2.7,0H5"),
    ],
)
def test_a_short_path_goes_through_the_same_points(path: str, short: str) -> None:
    around = '<path id="M1.234,5" aria-label="GiB: 2.3935508728" d="{}" fill="#54a24b"/>'
    assert with_short_paths(around.format(path)) == around.format(short)


@pytest.mark.render
def test_letters_that_no_svg_can_hold_are_replaced() -> None:
    """vl-convert aborts the process at them."""
    texts = [
        f"{letter}<&" for letter in ("\0", "\x1b", "\x1e", "\x7f", "\ufffe", "\uffff", "\ud800")
    ]
    chart = {
        "title": texts[1],
        "data": {"values": [{text: 1, "name": text} for text in texts]},
        "mark": "bar",
        "encoding": {"y": {"field": "name", "type": "nominal"}, "x": {"field": texts[2]}},
    }
    picture = draw([chart, chart])
    assert picture.problem == ""
    assert picture.png.startswith(b"\x89PNG")
    assert all(text in picture.svg for text in ("␀&lt;&amp;", "␛&lt;", "\ufffd&lt;"))


@pytest.mark.render
def test_an_equal_chart_is_drawn_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import vl_convert

    chart = [{"title": title, "data": {"values": []}, "mark": "bar"} for title in ("a", "b")]
    drawn = []

    def convert(spec: object) -> str:
        drawn.append(spec)
        return f"<svg xmlns='http://www.w3.org/2000/svg' width='1' height='1'>{len(drawn)}</svg>"

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(vl_convert, "vegalite_to_svg", convert)
    first = draw(chart)
    assert (draw(chart), drawn) == (first, chart)
    # A damaged file is no picture, and another version of vl-convert draws other ones.
    for file in tmp_path.glob("*/pictures/*"):
        file.write_bytes(file.read_bytes()[:-1])
    assert draw(chart).svg != first.svg
    monkeypatch.setattr(rendering, "_renderer", lambda: ["another version"])
    draw(chart)
    assert drawn == 3 * chart
    # A cache that cannot be written is no reason to fail.
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    draw(chart)
    assert drawn == 4 * chart


@pytest.mark.render
def test_the_width_of_a_chart_does_not_depend_on_the_fonts_of_the_machine(tmp_path: Path) -> None:
    """Older versions of Liberation Sans have other widths: another font stands for one here."""
    # Imported here, because each process of the tests collects all of them.
    import matplotlib
    from fontTools.ttLib import TTFont

    bare, furnished = tmp_path / "bare", tmp_path / "furnished"
    for folder in (bare, furnished):
        folder.mkdir()
    another = TTFont(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"))
    for record in another["name"].names:
        if record.nameID in (1, 4, 16):
            record.string = "Liberation Sans"
    another.save(furnished / "LiberationSans-Regular.ttf")
    assert drawn_with(bare) == drawn_with(furnished)


def drawn_with(fonts: Path) -> str:
    config = fonts / "fonts.conf"
    config.write_text(f"<fontconfig><dir>{fonts}</dir></fontconfig>")
    legend = {"field": "what", "legend": {"labelLimit": 0}}
    values = [{"what": "small · fp32 · blocks · train_step", "much": 1}]
    chart = {"data": {"values": values}, "mark": "bar", "config": {"font": "Liberation Sans"}}
    chart["encoding"] = {"x": {"field": "much", "type": "quantitative"}, "color": legend}
    program = f"from orchestrator.report.charts.rendering import draw; print(draw([{json.dumps(chart)}]).svg)"
    environment = {**os.environ, "FONTCONFIG_FILE": str(config)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("<svg")
    return done.stdout
