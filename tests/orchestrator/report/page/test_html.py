"""The report as one page: what is in it, that nothing in it is markup that should not be, and how it behaves in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.analysis.results import load_results
from orchestrator.execution.child_environment import write_rerun_script
from orchestrator.report.charts.registry import PLOTS, Drawing, Plot, begin_drawing, figure_files
from orchestrator.report.formats.markdown import lay_out
from orchestrator.report.page.cell_details import read_details
from orchestrator.report.page.html import PageContent, to_html
from orchestrator.report.tables.status_tables import FAILURES
from orchestrator.report.text.key_findings import key_findings
from orchestrator.store.artifacts import read_artifacts
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from tasks.spec.attempt import LOG_FILE
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status
from tests.conftest import ROOT, watched, with_samples
from tests.orchestrator.report.page.test_packing import unpack
from tests.test_architecture import a_run

MakeOutcome = Callable[..., Outcome]
SCRIPT = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 1'>"


class Outline(HTMLParser):
    """What a page is made of: its ids, its links, its headings, what it holds as data, and the names of all its elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.series: list[
            list[str]
        ] = []  # the name and the unit of each series of samples, which cells name by its place
        self.rows: list[list[list[str]]] = []  # of each table, those beyond the first
        self.charts: list[dict[str, Any]] = []
        self.cells: list[dict[str, Any]] = []
        self._data: dict[str, str] = {}  # the attributes of the packed data that comes next
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found["href"]] if "href" in found else []
        self.sources += [found["src"]] if "src" in found else []
        self._data = found if found.get("type") == "text/plain" else {}

    def handle_data(self, data: str) -> None:
        match self._data:
            case {"id": "series"}:
                self.series = unpack(data)
            case {"class": "rows"}:
                self.rows.append(unpack(data))
            case {"class": "spec"}:
                self.charts.append(unpack(data))
            case {"data-cell": cell}:
                self.cells.append(unpack(data))
                assert self.cells[-1]["cell"] == cell
        self._data = {}


def page_of(run: Run, with_figures: bool = False) -> str:
    results = load_results(run)
    drawing = begin_drawing(results) if with_figures else Drawing()
    details = read_details(run, results, partial(read_artifacts, run))
    content = PageContent(results, key_findings(results), lay_out(results), drawing, details)
    return "".join(to_html(content))


@pytest.fixture
def run(tmp_path: Path, make_outcome: MakeOutcome) -> Run:
    """Two sizes, three lengths, two precisions; one cell out of memory; a script wherever a text comes from outside."""
    with open_for_writing(Run(tmp_path / "run")) as writer:
        writer.write_manifest(
            {
                "name": SCRIPT,
                "config": {"description": SCRIPT},
                "invocations": [{"time": "now", "command": ["run", SCRIPT], "commit": SCRIPT}],
            }
        )
        for place, context in enumerate((16, 32, 64)):
            for precision, share in (("fp32", 1.0), ("bf16", 0.5)):
                times = tuple(share * (10.0 ** (place + 1) + step) for step in range(3))
                writer.append(
                    make_outcome(step_ms=times, context_length=context, precision=precision), SCRIPT
                )
        failed = make_outcome(Status.OOM, context_length=128)
        failed.evidence["message"] = SCRIPT  # type: ignore[index]
        failed.attempt.path.mkdir(parents=True)
        (failed.attempt.path / LOG_FILE).write_text(f"said at the end: {SCRIPT}")
        write_rerun_script(failed.attempt)
        writer.append(failed, None)
    return Run(tmp_path / "run")


def failed_cell(run: Run) -> str:
    cells = load_results(run).cells
    return str(cells.loc[cells["status"] == "oom", "cell"].item())


@pytest.mark.render
def test_every_table_and_chart_is_a_section_that_the_contents_name(run: Run) -> None:
    outline = Outline(page_of(run, with_figures=True))
    pages = lay_out(load_results(run))
    assert {f"table-{page.table.name}" for page in pages} <= set(outline.ids)
    assert {
        "chart-step-time",
        "chart-precision-speed-up",
        "chart-phases",
        "chart-kernel-classes",
    } <= set(outline.ids)
    local = {link.removeprefix("#") for link in outline.links}
    assert local >= {f"table-{page.table.name}" for page in pages}
    assert local <= set(outline.ids)
    assert len(outline.ids) == len(set(outline.ids))
    assert {"header", "nav", "main", "h1", "h2", "dialog"} <= set(outline.tags)


def test_every_number_of_every_table_is_in_it(run: Run) -> None:
    text = page_of(run)
    for page in lay_out(load_results(run)):
        assert all(
            f"<td>{number}" in text
            for row in page.rows
            for number in re.findall(r"^\d+\.\d+", " ".join(row))
        )
        assert page.table.title in text


def test_nothing_that_came_from_outside_is_markup(run: Run) -> None:
    text = page_of(run)
    assert "<script>window" not in text
    assert "img" not in Outline(text).tags
    assert any(SCRIPT in cell["log"] for cell in Outline(text).cells)
    assert text.count("<script") == text.count("</script>")


def test_it_needs_nothing_else(run: Run) -> None:
    text = page_of(run)
    outline = Outline(text)
    assert not outline.sources
    assert all(link.startswith("#") for link in outline.links)
    assert "default-src 'none'" in text
    assert "innerHTML" not in text


def test_a_cell_says_all_that_is_known_of_it(run: Run) -> None:
    outline = Outline(page_of(run))
    cells = outline.cells
    assert len(cells) == 7
    failed = next(cell for cell in cells if cell["status"] == "oom")
    assert failed["attempts"][0]["evidence"] == {"message": SCRIPT, "asked_bytes": "2,147,483,648"}
    assert failed["attempts"][0]["where"] == "warm-up / backward"
    assert failed["log"] == f"said at the end: {SCRIPT}"
    assert "attempt.json" in failed["by_hand"]
    slowest = next(
        cell
        for cell in cells
        if cell["parameters"]["context_length"] == "64"
        and cell["parameters"]["precision"] == "fp32"
    )
    assert [
        outline.series.index(["timing synced step duration", "ms"]),
        [1000, 1001, 1002],
    ] in slowest["samples"]
    assert slowest["by_hand"] == ""


@pytest.mark.render
def test_rows_beyond_the_first_are_data(tmp_path: Path, make_outcome: MakeOutcome) -> None:
    with open_for_writing(Run(tmp_path / "run")) as writer:
        writer.write_manifest({"name": "many"})
        for seed in range(201):
            writer.append(make_outcome(seed=seed), None)
    beyond = [rows for rows in Outline(page_of(Run(tmp_path / "run"))).rows if len(rows) == 1]
    assert ["16", "200"] in [row[1:3] for (row,) in beyond]


@pytest.mark.render
def test_it_holds_the_charts_as_they_are_drawn(run: Run) -> None:
    drawn = [figure.spec for figure in begin_drawing(load_results(run)).figures()]
    assert Outline(page_of(run, with_figures=True)).charts == drawn


def test_without_a_cell_it_says_so(tmp_path: Path) -> None:
    with open_for_writing(Run(tmp_path / "run")) as writer:
        writer.write_manifest({"name": "empty"})
    text = page_of(Run(tmp_path / "run"))
    assert "Nothing is measured yet" in text
    assert len(text) < 100_000


@pytest.mark.render
def test_figures_are_files_of_their_kind(run: Run) -> None:
    files = figure_files(begin_drawing(load_results(run)).figures())
    assert {name for name in files if name.endswith(".svg")} >= {
        "figures/step-time.svg",
        "figures/phases.svg",
    }
    for name, content in files.items():
        if isinstance(content, bytes):
            assert content.startswith(b"\x89PNG")
        else:
            assert content.startswith("<svg")
            assert f"{name.removesuffix('.svg')}.png" in files


@pytest.mark.render
def test_a_chart_shows_the_medians_of_the_table(run: Run) -> None:
    (figure,) = [
        figure
        for figure in begin_drawing(load_results(run)).figures()
        if figure.plot.name == "precision-speed-up"
    ]
    (points,) = figure.spec["datasets"].values()
    assert {point["context_length"]: point["value"] for point in points} == {
        16: 2.0,
        32: 2.0,
        64: 2.0,
    }


@pytest.mark.render
def test_a_chart_of_kernels_alone_shows_what_they_gain(
    tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    with open_for_writing(Run(tmp_path / "run")) as writer:
        writer.write_manifest({})
        for length in (16, 32):
            for precision, ms in (("fp32", 30.0), ("bf16", 30.0 / length)):
                outcome = make_outcome(precision=precision, context_length=length)
                writer.append(with_samples(outcome, *watched([ms] * 6)), None)
    figures = {
        figure.plot.name: figure
        for figure in begin_drawing(load_results(Run(tmp_path / "run"))).figures()
    }
    (points,) = figures["precision-kernels"].spec["datasets"].values()
    assert {point["context_length"]: point["value"] for point in points} == {16: 16.0, 32: 32.0}
    (points,) = figures["precision-speed-up"].spec["datasets"].values()
    assert {point["value"] for point in points} == {1.0}


def test_a_chart_of_one_point_is_left_out(tmp_path: Path, make_outcome: MakeOutcome) -> None:
    with open_for_writing(Run(tmp_path / "run")) as writer:
        writer.write_manifest({})
        writer.append(make_outcome(context_length=16), None)
    assert {
        figure.plot.name for figure in begin_drawing(load_results(Run(tmp_path / "run"))).figures()
    } == {
        "phases",
        "kernel-classes",
    }


@pytest.mark.render
def test_a_chart_that_fails_takes_nothing_with_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        def draw(self, results: object) -> None:
            raise ValueError("<b>no</b>")

    monkeypatch.setattr(
        "orchestrator.report.charts.registry.PLOTS",
        (Plot("failing", "Failing", "", Failing()), *PLOTS),
    )
    text = page_of(run, with_figures=True)
    assert "could not be drawn: ValueError: &lt;b&gt;no" in text
    assert 'id="chart-step-time"' in text
    assert not any(
        "failing" in name for name in figure_files(begin_drawing(load_results(run)).figures())
    )


@pytest.mark.render
def test_the_command_writes_it_and_says_where(run: Run, sweep: Callable[..., Any]) -> None:
    done = sweep("report", run.folder)
    page = run.folder / "report" / "index.html"
    assert str(page) in done.stderr
    assert done.returncode == 0
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert (page.parent / "figures" / "step-time.svg").exists()


@pytest.mark.render
@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["plan", "configs/demo.yaml"],
        ["status", "{run}"],
        ["report", "{run}", "--table", "timings"],
    ],
)
def test_what_draws_is_loaded_only_for_the_page(words: list[str], tmp_path: Path) -> None:
    program = (
        "import sys\nfrom orchestrator.cli.main import main\n"
        "try: main(sys.argv[1:], prog_name='sweep')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "loaded = {'altair', 'vl_convert', 'jinja2'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    run = a_run(tmp_path)
    command = [sys.executable, "-c", program, *(word.format(run=run) for word in words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("ended", [None, Status.OOM, Status.LOST])
def test_where_no_cell_is_finished_it_says_so(
    ended: Status | None, tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    with open_for_writing(Run(tmp_path / "run")) as writer:
        writer.write_manifest({"name": "begun"})
        if ended is not None:
            writer.append(make_outcome(ended), None)
    text = page_of(Run(tmp_path / "run"), with_figures=True)
    assert ("Nothing is measured yet" in text) is (ended is None)
    assert 'href="#chart-' not in text  # nor one that could not be drawn
    assert ('id="table-failures"' in text) is (ended is not None)
    assert orchestrator.load(tmp_path / "run").kernels.empty


def test_a_torn_part_is_one_line(run: Run, sweep: Callable[..., Any]) -> None:
    part = sorted((run.folder / "attempts").glob("*.parquet"))[0]
    part.write_bytes(part.read_bytes()[:-20])
    done = sweep("report", run.folder)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert str(part) in done.stderr


@pytest.fixture
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    program, driver = (
        shutil.which("chromium") or shutil.which("google-chrome"),
        shutil.which("chromedriver"),
    )
    if program is None or driver is None:
        pytest.skip("needs Chromium and its driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--window-size=1400,1000",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield opened
    opened.quit()


def wait(browser: Any, script: str) -> Any:
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(browser, 30).until(
        lambda opened: opened.execute_script(f"return {script}")
    )


def column(browser: Any, table: str, title: str) -> list[str]:
    script = """
      const section = document.getElementById("table-" + arguments[0]);
      const place = [...section.querySelectorAll("th")].findIndex((head) => head.textContent === arguments[1]);
      return [...section.querySelectorAll("tbody tr")].map((row) => row.cells[place].textContent);
    """
    texts: list[str] = browser.execute_script(script, table, title)
    return texts


def press(browser: Any, table: str, title: str) -> None:
    """By keyboard alone."""
    from selenium.webdriver.common.keys import Keys

    buttons = browser.find_elements("css selector", f"#table-{table} th button")
    next(button for button in buttons if button.text == title).send_keys(Keys.ENTER)


@pytest.mark.browser
def test_in_a_browser(run: Run, browser: Any) -> None:
    """It opens, shows its charts, sorts, filters and opens a cell; logs no error and asks for nothing but itself."""
    page = run.folder / "index.html"
    page.write_text(page_of(run, with_figures=True))
    browser.get(page.as_uri())
    charts = len(browser.find_elements("css selector", ".chart"))
    wait(browser, f"document.querySelectorAll('.chart svg.marks').length === {charts}")
    assert charts >= 4
    browser.set_window_size(700, 1000)
    assert (
        browser.execute_script(
            "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        == 0
    )
    browser.set_window_size(1400, 1000)
    assert browser.execute_script("return window.broken") is None

    shown = column(browser, "cells", "step ms")
    press(browser, "cells", "step ms")
    ascending = ["5.500", "11.00", "50.50", "101.0", "500.5", "1001.0", "OOM"]
    assert sorted(shown) != ascending
    assert column(browser, "cells", "step ms") == ascending
    press(browser, "cells", "step ms")
    assert column(browser, "cells", "step ms") == [*reversed(ascending[:-1]), "OOM"]
    press(browser, "cells", "step ms")
    assert column(browser, "cells", "step ms") == shown

    own = browser.find_element("css selector", "#table-cells .filter")
    own.send_keys("bf16 64")
    assert column(browser, "cells", "context_length") == ["64"]
    assert browser.find_element("css selector", "#table-cells .count").text == "1 of 7 rows"
    own.clear()
    browser.find_element("id", "filter-all").send_keys("fp32")
    assert set(column(browser, "timings", "precision")) == {"fp32"}

    browser.find_element("link text", failed_cell(run)).click()
    dialog = browser.find_element("id", "cell")
    wait(browser, "document.getElementById('cell').open")
    assert SCRIPT in dialog.text
    assert "warm-up / backward" in dialog.text
    browser.find_element("id", "close").click()
    assert not dialog.is_displayed()

    before = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    browser.find_element("id", "theme").click()
    assert (
        browser.execute_script("return getComputedStyle(document.body).backgroundColor") != before
    )

    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {
        sent["params"]["request"]["url"].split("#")[0]
        for sent in messages
        if sent["method"] == "Network.requestWillBeSent"
    }
    assert asked == {page.as_uri()}


@pytest.mark.browser
def test_in_a_browser_it_shows_what_it_holds_packed(
    tmp_path: Path, browser: Any, make_outcome: MakeOutcome
) -> None:
    """All rows of all tables, once they are asked for, and what is known of a cell."""
    with open_for_writing(Run(tmp_path / "run")) as writer:
        writer.write_manifest({"name": "many"})
        for seed in range(230):
            times = (0.125 + seed, 0.5, 1234.5678)
            outcome = make_outcome(
                Status.OOM if seed == 229 else Status.OK, step_ms=times, seed=seed
            )
            if seed == 229:
                outcome.evidence["traceback"] = "Traceback:\n  File x"  # type: ignore[index]
            writer.append(outcome, None)
    run = Run(tmp_path / "run")
    page = run.folder / "index.html"
    page.write_text(page_of(run))
    browser.get(page.as_uri())
    for table in lay_out(load_results(run)):
        section = f"document.getElementById('table-{table.table.name}')"
        browser.execute_script(
            f"const more = {section}.querySelector('.more'); while (!more.hidden) more.click()"
        )
        shown = f"[...{section}.querySelectorAll('tbody tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
        assert browser.execute_script(f"return {shown}") == table.rows, table.table.name

    outline = Outline(page.read_text())
    well, badly = (
        next(cell for cell in outline.cells if cell["status"] == status) for status in ("ok", "oom")
    )
    for known in (well, badly):
        browser.execute_script("location.hash = `#cell-${arguments[0]}`", known["cell"])
        wait(
            browser,
            f"document.getElementById('cell-title')?.textContent.includes('{known['cell']}')",
        )
        said = browser.execute_script("return document.getElementById('cell-content').textContent")
        for name, value in {**known["parameters"], **known["attempts"][0]["evidence"]}.items():
            assert f"{name}{value}" in said
        for place, values in known["samples"]:
            name, unit = outline.series[place]
            assert f"{name}{', '.join(f'{value:.10g}' for value in values)}{unit}" in said
    assert well["samples"]
    assert "Traceback:\n  File x" in said
    assert browser.get_log("browser") == []


def click(browser: Any, selector: str, text: str = "") -> Any:
    """As somebody would: on the first of these that says it."""
    found = next(one for one in browser.find_elements("css selector", selector) if text in one.text)
    found.click()
    return found


@pytest.mark.browser
def test_what_a_stranger_asks_takes_no_more_than_three_clicks(
    run_of_every_kind: Run, browser: Any, tmp_path: Path
) -> None:
    """Why a cell failed, and which kernel dominates the backward pass of xl, of cells that an H200 measured."""
    results = load_results(run_of_every_kind)
    page = tmp_path / "index.html"
    page.write_text(page_of(run_of_every_kind))
    browser.get(page.as_uri())

    failed = results.cells[results.cells["status"] == "oom"].iloc[-1]
    click(browser, "nav a", FAILURES.title)
    click(browser, "#table-failures tbody a", failed["cell"])
    wait(browser, "document.getElementById('cell').open")
    said = browser.find_element("id", "cell").text
    assert "CUDA out of memory. Tried to allocate" in said
    assert failed["message"][:120] in said.replace("\n", " ")
    assert f"{int(failed['asked_bytes']):,}" in said
    browser.find_element("id", "close").click()

    click(browser, "nav a", "Top kernels by phase")
    click(browser, "#table-kernels .filter").send_keys("xl train_step backward")
    (first, *_) = column(browser, "kernels", "name")
    xl = results.cells[(results.cells["size"] == "xl") & (results.cells["pass"] == "train_step")]
    kernels = results.kernels().merge(xl[["cell"]], on="cell")
    by_name = kernels[kernels["phase"] == "backward"].groupby("name")["ms"].sum()
    assert first[:60] in str(by_name.idxmax())
    assert float(column(browser, "kernels", "total ms")[0]) == pytest.approx(
        by_name.max(), rel=1e-3
    )
    assert browser.get_log("browser") == []


def test_a_torn_part_is_one_line_with_its_remedy(run: Run, sweep_here: Callable[..., Any]) -> None:
    part = next((run.folder / "samples").glob("*.parquet"))
    part.write_bytes(part.read_bytes()[:200])
    done = sweep_here("report", run.folder)
    assert done.exit_code == 2
    assert f"{part}: cannot be read" in done.output
    assert "Copy it again" in done.output
    assert not (run.folder / "report").exists()
