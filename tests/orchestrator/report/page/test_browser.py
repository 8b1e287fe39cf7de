"""The page of the published runs in a browser: size, first screen, filters, drawer, access, print."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.analysis.results import load_results
from orchestrator.report.charts.registry import drawn_figures
from orchestrator.report.findings.registry import findings
from orchestrator.report.formats.files import copies_of
from orchestrator.report.page.cell_data import read_details
from orchestrator.report.page.html import RenderedReport, to_html
from orchestrator.report.tables.registry import lay_out
from orchestrator.store.open import open_runs
from orchestrator.store.run import Run
from orchestrator.store.run_writer import RunWriter
from orchestrator.store.tables import SCHEMAS
from tests.conftest import ROOT

AXE = ROOT / "tests" / "data" / "axe.min.js"
RULES = ["wcag2a", "wcag2aa", "wcag21aa", "wcag22aa"]
PHONE, TABLET, DESKTOP = (390, 844), (768, 1024), (1440, 900)
MOST_BYTES, MOST_ELEMENTS, MOST_WITH_CELLS = 1_000_000, 15_000, 16_000
MOST_SHEETS, MOST_PIXELS = 8, 8_000
pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of all published runs."""
    return page_of("results/published/h200", tmp_path_factory)


@pytest.fixture(scope="module")
def page_with_memory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with recorded memory."""
    return page_of("tests/data/h200_cells", tmp_path_factory)


@pytest.fixture(scope="module")
def page_of_two_gpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run on two GPUs."""
    return page_of("results/published/h100x2", tmp_path_factory)


def page_of(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = open_runs([ROOT / folder])
    results = load_results(run)
    details = read_details(run, results)
    tables = lay_out(results)
    figures = drawn_figures(results)
    report = RenderedReport(results, findings(results), tables, figures, "results/h200")
    copies = {table.table.name: copies_of(table) for table in tables}
    path = tmp_path_factory.mktemp("page") / "index.html"
    path.write_text("".join(to_html(report, details, copies)))
    return path


@pytest.fixture(scope="module")
def opened() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("needs Chromium and its driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--hide-scrollbars",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield browser
    browser.quit()


@pytest.fixture
def browser(opened: Any, page: Path) -> Iterator[Any]:
    """A browser with the page open on a desktop. Afterwards, it must have logged no error."""
    resize(opened, DESKTOP)
    opened.get("about:blank")
    opened.get(page.as_uri())
    yield opened
    assert opened.get_log("browser") == []


def test_texts_of_somebody_else_run_nothing(opened: Any, tmp_path: Path) -> None:
    harm = "&<img src=x onerror=\"document.title='harmed'\">"
    run, received = Run(ROOT / "results" / "published" / "h200" / "tenth"), tmp_path / "received"
    writer = RunWriter(received)
    received_tables = {}
    for table in SCHEMAS:
        rows = run.read(table)
        if table == "attempts":
            texts = [
                json.dumps(
                    {**json.loads(text), "precision": f"{harm}{index % 2}", "attention": harm}
                    | {"pass": harm}
                )
                for index, text in enumerate(rows["params"])
            ]
            rows = rows.assign(params=texts, contents=None)
        received_tables[table] = rows
    writer.write_tables(received_tables)
    results = load_results(writer)
    report = RenderedReport(results, findings(results), lay_out(results), [], "x")
    path = tmp_path / "index.html"
    path.write_text("".join(to_html(report, read_details(writer, results), {})))
    opened.get("about:blank")
    opened.get(path.as_uri())
    show_all_cells(opened)
    place = column_of(opened, "precision")
    shown = f"document.querySelector('#all td:nth-child({place})').textContent"
    wait(opened, f"{shown} === {json.dumps(harm + '0')}")
    assert f"all cells: {harm}" in opened.find_element("css selector", "#cells .key").text
    opened.execute_script(f"document.querySelector('#all th:nth-child({place})').click()")
    assert opened.title != "harmed"
    assert opened.get_log("browser") == []


def resize(browser: Any, size: tuple[int, int]) -> None:
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def use_theme(browser: Any, theme: str) -> None:
    feature = {"name": "prefers-color-scheme", "value": theme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def wait(browser: Any, script: str) -> Any:
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(browser, 30).until(
        lambda opened: opened.execute_script(f"return {script}")
    )


def show_all_cells(browser: Any) -> None:
    browser.execute_script("document.getElementById('cells').scrollIntoView()")
    wait(browser, "document.querySelectorAll('#all tbody tr').length === 25")


def column_of(browser: Any, title: str) -> int:
    """Return the number of a column of all cells, from 1."""
    titles = "[...document.querySelectorAll('#all th')].map((one) => one.textContent.trim())"
    found: list[str] = browser.execute_script(f"return {titles}")
    return found.index(title) + 1


def count_of_cells(browser: Any) -> str:
    text: str = browser.execute_script("return document.querySelector('.dt-info').textContent")
    return text


def write_words(browser: Any, words: str) -> None:
    browser.execute_script(
        "const box = document.getElementById('words'); box.value = arguments[0];"
        "box.dispatchEvent(new Event('input', {bubbles: true}))",
        words,
    )


def elements(browser: Any) -> int:
    count: int = browser.execute_script("return document.querySelectorAll('*').length")
    return count


def test_the_page_is_small_and_requests_no_other_resource(browser: Any, page: Path) -> None:
    browser.get_log("performance")  # other tests have opened other pages
    browser.get("about:blank")
    browser.get(page.as_uri())
    assert page.stat().st_size <= MOST_BYTES
    assert elements(browser) <= MOST_ELEMENTS
    assert browser.execute_script("return document.documentElement.scrollHeight") <= MOST_PIXELS
    show_all_cells(browser)
    assert elements(browser) <= MOST_WITH_CELLS
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {
        sent["params"]["request"]["url"].split("#")[0]
        for sent in messages
        if sent["method"] == "Network.requestWillBeSent"
    }
    assert {url for url in asked if not url.startswith(("blob:", "about:"))} == {page.as_uri()}
    visible = re.sub(r"<script.*?</script>", "", page.read_text(), flags=re.DOTALL)
    assert "://" not in visible


@pytest.mark.parametrize("size", [PHONE, DESKTOP])
def test_the_first_screen_has_the_answers(browser: Any, page: Path, size: tuple[int, int]) -> None:
    resize(browser, size)
    browser.get("about:blank")
    browser.get(page.as_uri())
    paint = wait(browser, "performance.getEntriesByName('first-contentful-paint')[0]?.startTime")
    assert paint < 1000
    top = "document.querySelector('h1').getBoundingClientRect().top"
    assert browser.execute_script(f"return {top}") < 120
    assert len(browser.find_elements("css selector", ".answers li")) == 5
    for selector in (".answers", ".heat") if size == DESKTOP else ():
        bottom = f"document.querySelector('{selector}').getBoundingClientRect().bottom"
        assert browser.execute_script(f"return {bottom}") < size[1]


@pytest.mark.parametrize("size", [PHONE, TABLET, DESKTOP])
def test_the_report_page_and_its_tables_are_never_wider_than_the_screen(
    browser: Any, size: tuple[int, int]
) -> None:
    resize(browser, size)
    browser.execute_script(
        "document.querySelectorAll('details').forEach((one) => (one.open = true))"
    )
    show_all_cells(browser)
    too_wide = browser.execute_script(
        "return [...document.querySelectorAll('.table')]"
        ".filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.id)"
    )
    assert too_wide == []
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP])
def test_the_page_has_no_accessibility_violations(
    browser: Any, theme: str, size: tuple[int, int]
) -> None:
    """axe-core finds no violation, with the drawer closed and open."""
    resize(browser, size)
    use_theme(browser, theme)
    show_all_cells(browser)
    browser.execute_script(AXE.read_text())
    assert violations(browser) == []
    browser.execute_script("location.hash = '#cell=full:04a353b0887c'")
    wait(browser, "document.getElementById('cell').open")
    assert violations(browser) == []


def violations(browser: Any) -> list[Any]:
    browser.set_script_timeout(120)
    found: list[Any] = browser.execute_async_script(
        "const done = arguments[1];"
        "axe.run({runOnly: arguments[0]}).then(({violations}) => done(violations.map("
        "(one) => [one.id, one.nodes.length, one.nodes.slice(0, 3).map((node) => node.html)])))",
        RULES,
    )
    return found


def test_every_word_must_match_and_the_address_holds_the_filter(browser: Any, page: Path) -> None:
    show_all_cells(browser)
    assert count_of_cells(browser) == "1–25 of 1,333 cells"
    write_words(browser, "2.7B bf16 1024")
    assert count_of_cells(browser).startswith("1–18 of 18 cells")
    address = browser.current_url
    browser.get("about:blank")
    browser.get(address)
    wait(browser, "document.querySelectorAll('#all tbody tr').length === 18")
    write_words(browser, "nothing-like-this")
    assert count_of_cells(browser).startswith("0 cells")


def test_sizes_sort_from_small_to_large_and_missing_times_are_last(browser: Any) -> None:
    show_all_cells(browser)
    names = browser.execute_script(
        "const data = DataTable.tables ? new DataTable('#all') : null;"
        "return [...new Set(data.rows({order: 'applied'}).data().toArray().map((one) => one.axes.size))]"
    )
    sizes = [name for name in names if name]
    assert sizes == ["small", "medium", "large", "xl", "2.7B", "10B"]
    place = column_of(browser, "ms")
    head = browser.find_element("css selector", f"#all th:nth-child({place}) [role=button]")
    browser.execute_script("arguments[0].click()", head)
    times = browser.execute_script(
        "return new DataTable('#all').rows({order: 'applied'}).data().toArray().map((one) => one.step ?? null)"
    )
    known = [time for time in times if time is not None]
    assert known == sorted(known)
    assert times[: len(known)] == known


def test_the_address_of_a_cell_opens_its_drawer(browser: Any, page: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.get("about:blank")
    browser.get(f"{page.as_uri()}#cell=full:04a353b0887c")
    wait(browser, "document.getElementById('cell').open")
    title = browser.find_element("id", "cell-title").text
    assert title == "2.7B, context 1,024, bf16, eager, training step"
    content = browser.find_element("id", "cell-content").text
    assert "574.9 ms [" in content
    assert "sweep show results/h200 full:04a353" in content
    wait(browser, "document.querySelectorAll('.strip circle').length === 10")
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    wait(browser, "!document.getElementById('cell').open")
    assert browser.current_url == page.as_uri()


def test_a_reader_can_zoom_the_memory_of_a_step(opened: Any, page_with_memory: Path) -> None:
    resize(opened, DESKTOP)
    opened.get("about:blank")
    opened.get(page_with_memory.as_uri())
    # Without a script, the chart is there, and leads to the cell that it shows.
    link = opened.find_element("css selector", "#chart-memory-timeline svg a")
    opened.execute_script("arguments[0].dispatchEvent(new MouseEvent('click'))", link)
    wait(opened, "document.querySelectorAll('.timeline polygon').length > 3")
    look = "return [...document.querySelectorAll('.timeline polygon, .timeline svg text')].map((one) => one.getAttribute('points') ?? one.textContent)"
    whole, words = opened.execute_script(look), opened.find_element("css selector", ".timeline p")
    assert re.fullmatch(r"19\.9 ms, backward: 2\.96 GiB", words.text.split("\n")[0])  # the peak
    assert {"forward", "backward", "optimizer"} <= set(whole)
    opened.find_element("css selector", ".timeline [aria-label='Zoom in']").click()
    near = opened.execute_script(look)
    assert near != whole
    assert {"14.05 ms", "42.15"} <= set(near)  # the middle half of 56.20 ms
    opened.find_element("css selector", ".timeline [aria-label='Whole step']").click()
    assert opened.execute_script(look) == whole
    drag_over(opened, "document.querySelector('.timeline svg')", (0.5, 0.9))
    dragged = opened.execute_script(look)
    assert dragged not in (whole, near)
    assert "forward" not in dragged  # begins before the chosen part
    opened.execute_script(AXE.read_text())
    assert violations(opened) == []
    assert opened.get_log("browser") == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP])
def test_the_charts_of_several_gpus_fit_the_screen_and_lead_to_cells(
    opened: Any, page_of_two_gpus: Path, theme: str, size: tuple[int, int]
) -> None:
    resize(opened, size)
    use_theme(opened, theme)
    opened.get("about:blank")
    opened.get(page_of_two_gpus.as_uri())
    for chart, shapes in (("bus-bandwidth", 18), ("step-parts", 7)):
        links = opened.find_elements("css selector", f"#parallel #chart-{chart} svg a")
        assert len(links) >= shapes
        box = opened.find_element("css selector", f"#chart-{chart} svg").rect
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= size[0]
    opened.execute_script(AXE.read_text())
    assert violations(opened) == []
    opened.execute_script("arguments[0].dispatchEvent(new MouseEvent('click'))", links[0])
    wait(opened, "document.getElementById('cell').open")
    assert opened.execute_script("return location.hash") == links[0].get_dom_attribute("href")
    assert opened.get_log("browser") == []


def drag_over(browser: Any, element: str, shares: tuple[float, float]) -> None:
    """Press the pointer at one share of an element's width, and release it at another."""
    script = (
        f"const box = {element}.getBoundingClientRect();"
        "return [box.left, box.width, box.top + box.height / 2]"
    )
    left, width, y = browser.execute_script(script)
    for kind, share in (("mousePressed", 0), ("mouseMoved", 1), ("mouseReleased", 1)):
        event = {"type": kind, "x": left + width * shares[share], "y": y, "clickCount": 1}
        browser.execute_cdp_cmd("Input.dispatchMouseEvent", {**event, "button": "left"})


@pytest.mark.parametrize("size", [PHONE, TABLET])
def test_a_narrow_screen_hides_columns_and_breaks_no_word(
    browser: Any, size: tuple[int, int]
) -> None:
    resize(browser, size)
    show_all_cells(browser)
    broken = browser.execute_script(
        "const found = [], range = document.createRange();"
        "for (const cell of document.querySelectorAll('.table th, .table td:not(.long)')) {"
        "  if (cell.closest('#all td.text')) continue;"
        "  const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);"
        "  for (let node = walker.nextNode(); node; node = walker.nextNode())"
        "    for (const word of node.data.matchAll(/[^\\s\\-/\\\\]+/g)) {"
        "      range.setStart(node, word.index); range.setEnd(node, word.index + word[0].length);"
        "      const tops = [...range.getClientRects()].map((one) => Math.round(one.top));"
        "      if (new Set(tops).size > 1) found.push(word[0]);"
        "    }"
        "} return found"
    )
    assert broken == []
    titles = (
        "[...document.querySelectorAll('#table-precision th')].filter((one) => one.offsetWidth)"
    )
    shown = browser.execute_script(f"return {titles}.map((one) => one.textContent)")
    assert {"size", "context length", "fp32 ms", "bf16 ms"} <= set(shown)
    row = browser.find_element("css selector", "#all tbody tr").text
    assert "train step" in row or "forward" in row  # a cell has its pass


def test_all_cells_shows_the_run_and_the_batch(browser: Any) -> None:
    show_all_cells(browser)
    places = [column_of(browser, title) for title in ("run", "batch size", "other settings")]
    row = "document.querySelector('#all tbody tr')"
    texts = browser.execute_script(f"return [...{row}.cells].map((one) => one.textContent)")
    assert texts[places[0] - 1] in {
        path.name for path in (ROOT / "results/published/h200").iterdir()
    }
    assert texts[places[1] - 1] == "4"


def test_the_limit_switch_shows_where_memory_ran_out(browser: Any) -> None:
    """Where does xl at context 1,024 run out on a card of 40 GB?"""
    browser.find_element("css selector", "[data-switch=memory_limit_gib] [value='40.0']").click()
    script = (
        "[...document.querySelectorAll('.heat a.bad')].map((one) => one.getAttribute('aria-label'))"
    )
    cell = "xl, context 1,024, limit 40 GiB, run oom-map"
    labels = wait(browser, f"({script}).length ? {script} : null")
    assert f"{cell}, fp32, eager, training step: out of memory in forward" in labels
    assert f"{cell}, bf16, eager, training step: out of memory in forward" in labels


def test_the_switches_show_what_the_first_view_shows(browser: Any) -> None:
    """The script and Python write the same numbers, shades and labels."""
    look = (
        "[...document.querySelectorAll('.heat a')].map((one) => [one.textContent, one.style.cssText,"
        " [...one.classList].sort().join(' '), one.getAttribute('aria-label'),"
        " one.getAttribute('href')])"
    )
    before = browser.execute_script(f"return {look}")
    for measure in ("peak", "step"):
        browser.find_element("css selector", f".choice [value={measure}]").click()
        wait(browser, f"document.getElementById('heat-unit').textContent.includes('{measure}')")
    assert browser.execute_script(f"return {look}") == before


def test_red_is_for_cells_that_did_not_end_well(browser: Any) -> None:
    counts = browser.execute_script(
        "return [document.querySelectorAll('.bad').length,"
        " [...document.querySelectorAll('.bad')].filter((one) =>"
        " one.matches('.sub .bad, .heat a.bad, .fit td.bad, .table .status.bad')).length]"
    )
    assert counts[0] == counts[1] > 0


def test_the_page_prints_on_few_sheets_in_light_colours(browser: Any) -> None:
    use_theme(browser, "dark")
    printed = browser.execute_cdp_cmd(
        "Page.printToPDF", {"paperWidth": 8.27, "paperHeight": 11.69, "printBackground": True}
    )
    pdf = base64.b64decode(printed["data"])
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) <= MOST_SHEETS
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    colours = browser.execute_script(
        "const style = getComputedStyle(document.documentElement);"
        "return [style.getPropertyValue('--ink'), style.getPropertyValue('--bg')]"
    )
    assert colours == ["#1c2024", "#fdfdfb"]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_the_theme_button_changes_the_colours(browser: Any) -> None:
    use_theme(browser, "light")
    look = "return getComputedStyle(document.body).backgroundColor"
    before = browser.execute_script(look)
    browser.find_element("id", "theme").click()
    assert browser.execute_script(look) != before
