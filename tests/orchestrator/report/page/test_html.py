"""The report as one page: its content, that no text from outside is markup, and its size."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.analysis.results import load_results
from orchestrator.execution.child_environment import write_rerun_script
from orchestrator.report.charts.registry import PLOTS, Plot, drawn_figures, figure_files
from orchestrator.report.findings.registry import findings
from orchestrator.report.page.cell_data import cell_columns, read_details
from orchestrator.report.page.html import RenderedReport, to_html
from orchestrator.report.tables.registry import lay_out
from orchestrator.store.open import open_for_writing, open_runs
from orchestrator.store.run import Run
from tasks.spec.attempt import LOG_FILE
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status
from tests.conftest import ROOT
from tests.orchestrator.report.findings.test_findings import results_of, step
from tests.test_architecture import a_run

MakeOutcome = Callable[..., Outcome]
SCRIPT = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 1'>"


class Outline(HTMLParser):
    """The structure of a page: ids, links, names of elements, text, and packed data by id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.bad: list[str] = []  # classes of elements with the colour of failures
        self.data: dict[str, Any] = {}
        self.text = ""
        self._packed = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found["href"]] if "href" in found else []
        self.bad += [found["class"]] if "bad" in found.get("class", "").split() else []
        self._packed = found["id"] if found.get("type") == "text/plain" else ""

    def handle_data(self, data: str) -> None:
        if self._packed in ("data", "details"):
            self.data[self._packed] = json.loads(zlib.decompress(base64.b64decode(data)))
        elif self.tags and self.tags[-1] not in ("script", "style"):
            self.text += data
        self._packed = ""

    def cell(self, key: str) -> dict[str, Any]:
        """Return the columns and details of a cell as the script of the page reads them."""
        row = self.data["data"]["columns"]["key"]["v"].index(key)
        columns = {**self.data["data"]["columns"], **self.data["data"]["axes"]}
        values = {}
        for name, column in columns.items():
            index = column["i"][row] if "w" in column else 0
            word = column["w"][index] if "w" in column and index >= 0 else None
            values[name] = word if "w" in column else column["v"][row]
        return {**values, **self.data["details"][row]}


def page_of(run: Run, with_figures: bool = False) -> str:
    results = load_results(run)
    figures = drawn_figures(results) if with_figures else []
    details = read_details(run, results)
    report = RenderedReport(results, findings(results), lay_out(results), figures, "results/x")
    return "".join(to_html(report, details, {}))


@pytest.fixture
def run(tmp_path: Path, make_outcome: MakeOutcome) -> Run:
    """Two sizes, three lengths, two precisions; one cell out of memory; a script wherever a text comes from outside."""
    with open_for_writing(Run(tmp_path / "run")) as writer:
        writer.write_manifest(
            {
                "name": SCRIPT,
                "config": {"name": "test", "grids": [], "description": SCRIPT},
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


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {}


@pytest.fixture
def page(run: Run, pages: dict[str, str]) -> str:
    """The page of the run, which is rendered once."""
    if "run" not in pages:
        pages["run"] = page_of(run)
    return pages["run"]


def failed_cell(run: Run) -> str:
    cells = load_results(run).cells
    return str(cells.loc[cells["status"] == "oom", "cell"].item())


@pytest.mark.render
def test_charts_are_in_sections_that_the_bar_names(run: Run) -> None:
    outline = Outline(page_of(run, with_figures=True))
    assert {"chart-step-time", "chart-precision-speed-up", "chart-kernel-classes"} <= set(
        outline.ids
    )
    local = {link for link in outline.links if not link.startswith("#cell=")}
    assert {"#answers", "#time", "#cells", "#hand-in"} <= local
    assert local <= {f"#{name}" for name in outline.ids}
    assert len(outline.ids) == len(set(outline.ids))
    assert {"header", "nav", "main", "h1", "h2", "dialog", "svg"} <= set(outline.tags)


@pytest.mark.xdist_group("page")
def test_the_first_screen_has_answers_and_every_cell_of_the_grid(page: str) -> None:
    outline = Outline(page)
    # Three steps have no interval at 95 %.
    first, _, below = outline.text.partition("How long does a step take?")
    assert "bf16 makes no clear difference." in first
    assert "2.00×~" in first
    assert below
    keys = outline.data["data"]["columns"]["key"]["v"]
    steps = [key for key in keys if outline.cell(key)["status"] == "ok"]
    assert len(steps) == 6
    assert {f"#cell={key}" for key in keys} <= set(outline.links)


@pytest.mark.xdist_group("page")
def test_the_page_allows_no_script_but_its_own(page: str) -> None:
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    (script,) = re.findall(r'<script type="module">(.*?)</script>', page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (allowed,) = [rule for rule in policy.split("; ") if rule.startswith("script-src")]
    assert allowed == f"script-src 'sha256-{digest}' blob:"
    assert "{{" not in script  # no text from outside is part of it


@pytest.mark.xdist_group("page")
def test_nothing_that_came_from_outside_is_markup(page: str) -> None:
    assert "<script>window" not in page
    assert "img" not in Outline(page).tags
    assert page.count("<script") == page.count("</script>")
    assert "innerHTML" not in page


@pytest.mark.render
def test_the_html_page_needs_no_network(run: Run) -> None:
    text = page_of(run, with_figures=True)
    outline = Outline(text)
    assert all(link.startswith("#") for link in outline.links)
    assert "default-src 'none'" in text
    addresses = re.findall(r"https?://[^\s\"'<]+", text)
    assert set(addresses) <= {"http://www.w3.org/2000/svg"}  # the name space of drawings


@pytest.mark.xdist_group("page")
def test_a_cell_has_all_that_is_known_about_it(run: Run, page: str) -> None:
    outline = Outline(page)
    failed = outline.cell(f"{SCRIPT}:{failed_cell(run)}")
    assert (failed["status"], failed["stage"], failed["phase"]) == ("oom", "warm-up", "backward")
    assert failed["asked"] == 2.0
    (attempt,) = failed["attempts"]
    assert attempt["evidence"] == {"message": SCRIPT, "asked_bytes": "2,147,483,648"}
    assert attempt["where"] == "warm-up / backward"
    assert failed["log"] == f"said at the end: {SCRIPT}"
    cells = map(outline.cell, outline.data["data"]["columns"]["key"]["v"])
    (slowest,) = (c for c in cells if (c["context_length"], c["precision"]) == (64, "fp32"))
    assert slowest["samples"] == [1000, 1001, 1002]
    assert slowest["title"].endswith("context 64, fp32, eager, training step")
    assert slowest["step"] == 1001


@pytest.mark.xdist_group("page")
def test_all_cells_has_columns_for_what_varies_and_names_what_does_not(page: str) -> None:
    outline = Outline(page)
    shown = dict(outline.data["data"]["shown"])
    assert shown == {"name": "model", "context_length": "context", "precision": "precision"}
    assert "all cells: training step, eager" in outline.text
    assert outline.data["data"]["more"] == []


def test_other_axes_share_a_column_that_has_their_unusual_values(
    tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    axes: dict[str, tuple[Any, Any]] = {
        "context_length": (16, 32), "precision": ("fp32", "bf16"), "batch_size": (2, 4),
        "seed": (0, 1), "warmup_steps": (1, 2), "measured_steps": (3, 4), "vocab_size": (50, 60),
        "attention": ("naive", "sdpa"), "memory_limit_gib": (1.0, 2.0),
    }  # fmt: skip
    first = {axis: values[0] for axis, values in axes.items()}
    with open_for_writing(Run(tmp_path / "run")) as writer:
        writer.write_manifest({"name": "run"})
        writer.append(make_outcome(**first), None)
        for axis, (_, other) in axes.items():
            writer.append(make_outcome(**first | {axis: other}), None)
    data = Outline(page_of(Run(tmp_path / "run"))).data["data"]
    assert len(data["shown"]) == 8
    varying = {*axes} - {"seed"} | {"name"}
    assert {name for name, *_ in (*data["shown"], *data["more"])} == varying
    assert all(usual == str(first[name]) for name, _, usual in data["more"])


def test_a_setting_is_named_where_most_cells_have_none() -> None:
    """Few published cells have a memory limit: those under 32 GiB look like no others."""
    results = load_results(open_runs([ROOT / "results" / "published" / "h200"]))
    report = RenderedReport(results, [], [], [], "results/h200")
    data = Outline("".join(to_html(report, [{}], {}))).data["data"]
    usual = {name: value for name, _, value in data["more"]}
    assert usual["memory_limit_gib"] is None
    assert usual["warmup_steps"] == "5"


def test_commands_that_differ_in_their_time_limit_are_one(
    tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    tails = (["--time-limit", "9m"], ["--time-limit=90s"], [], ["--retry", "oom"])
    commands = [["run", "a.yaml", *tail] for tail in tails]
    with open_for_writing(Run(tmp_path / "run")) as writer:
        writer.write_manifest(
            {"name": "run", "invocations": [{"time": "now", "command": one} for one in commands]}
        )
        writer.append(make_outcome(), None)
    text = page_of(Run(tmp_path / "run"))
    shown = re.findall("<code>(sweep run a[^<]*)</code>", text)
    assert shown == ["sweep run a.yaml", "sweep run a.yaml --retry oom"]


def test_a_page_of_numerics_names_tables_that_it_has() -> None:
    text = page_of(Run(ROOT / "results" / "published" / "h200" / "numerics"))
    assert "--table accumulation --format tex" in text
    assert "--table timings" not in text
    # Their cells have neither times nor a model; what they are is their name.
    outline = Outline(text)
    assert "what" not in dict(outline.data["data"]["shown"])
    assert "†" not in outline.text


@pytest.mark.xdist_group("page")
def test_a_section_begins_with_the_answers_of_the_first_screen(page: str) -> None:
    _, _, below = Outline(page).text.partition("How long does a step take?")
    assert "bf16 makes no clear difference. Answers" in " ".join(below.split())


@pytest.mark.xdist_group("page")
def test_the_legend_of_the_answers_has_the_marks_that_occur(page: str) -> None:
    assert "~: may be chance" in page
    assert "†: CPU-bound" not in page


def test_attention_has_no_value_for_a_model_that_computes_its_own() -> None:
    models = ("gpt:GPT", "hf:gpt2", None)
    cells = [step(10, model=model, attention="naive") for model in models]
    results = results_of(*cells)
    results = replace(results, axes=(*results.axes, "model", "attention"))
    attention = cell_columns(results)["axes"]["attention"]
    assert [attention["w"][index] if index >= 0 else None for index in attention["i"]] == [
        None, "naive", "naive",
    ]  # fmt: skip


def test_only_a_status_has_the_colour_of_failures(
    tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    """A run named oom-map without a failure has no element with it."""
    with open_for_writing(Run(tmp_path / "oom-map")) as writer:
        writer.write_manifest({"name": "oom-map"})
        for context in (16, 32):
            writer.append(make_outcome(context_length=context), None)
    assert Outline(page_of(Run(tmp_path / "oom-map"))).bad == []
    with open_for_writing(Run(tmp_path / "oom-map")) as writer:
        writer.append(make_outcome(Status.OOM, context_length=64), None)
    classes = Outline(page_of(Run(tmp_path / "oom-map"))).bad
    # The count in the heading, the cell of the map, and statuses in tables.
    assert classes.count("bad") == 2
    assert set(classes) == {"bad", "status bad"}


def test_the_page_of_a_run_without_cells_says_nothing_is_measured(tmp_path: Path) -> None:
    with open_for_writing(Run(tmp_path / "run")) as writer:
        writer.write_manifest({"name": "empty"})
    text = page_of(Run(tmp_path / "run"))
    assert "Nothing is measured yet" in text
    assert len(text) < 150_000


@pytest.mark.render
def test_figures_are_files_of_their_kind(run: Run) -> None:
    files = figure_files(drawn_figures(load_results(run)))
    assert {name for name in files if name.endswith(".svg")} >= {
        "figures/step-time.svg",
        "figures/precision-speed-up.svg",
    }
    for name, content in files.items():
        if isinstance(content, bytes):
            assert content.startswith(b"\x89PNG")
        else:
            assert content.startswith("<svg")
            assert f"{name.removesuffix('.svg')}.png" in files


@pytest.mark.render
def test_a_chart_that_fails_takes_nothing_with_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        def __call__(self, results: object) -> None:
            raise ValueError("<b>no</b>")

    monkeypatch.setattr(
        "orchestrator.report.charts.registry.PLOTS",
        (Plot("failing", "time", "Failing", "", Failing()), *PLOTS),
    )
    text = page_of(run, with_figures=True)
    assert "could not be drawn: ValueError: &lt;b&gt;no" in text
    assert 'id="chart-step-time"' in text
    assert not any("failing" in name for name in figure_files(drawn_figures(load_results(run))))


@pytest.mark.render
def test_the_report_command_writes_the_html_page_and_prints_its_path(
    run: Run, sweep: Callable[..., Any]
) -> None:
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
def test_chart_and_template_libraries_are_loaded_only_for_the_html_page(
    words: list[str], tmp_path: Path
) -> None:
    program = (
        "import sys\nfrom orchestrator.cli.main import main\n"
        "try: main(sys.argv[1:], prog_name='sweep')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "loaded = {'vl_convert', 'jinja2'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    run = a_run(tmp_path)
    command = [sys.executable, "-c", program, *(word.format(run=run) for word in words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("ended", [None, Status.OOM, Status.LOST])
def test_the_page_says_nothing_is_measured_only_if_no_cell_has_ended(
    ended: Status | None, tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    with open_for_writing(Run(tmp_path / "run")) as writer:
        writer.write_manifest({"name": "begun"})
        if ended is not None:
            writer.append(make_outcome(ended), None)
    text = page_of(Run(tmp_path / "run"), with_figures=True)
    assert ("Nothing is measured yet" in text) is (ended is None)
    assert 'href="#chart-' not in text  # nor one that could not be drawn
    assert ('id="failures"' in text) is (ended is not None)
    assert orchestrator.load(tmp_path / "run").kernels.empty


def test_a_torn_part_is_one_line(run: Run, sweep_here: Callable[..., Any]) -> None:
    part = sorted((run.folder / "attempts").glob("*.parquet"))[0]
    part.write_bytes(part.read_bytes()[:-20])
    done = sweep_here("report", run.folder)
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    assert str(part) in done.stderr


def test_a_torn_part_is_one_line_with_its_remedy(run: Run, sweep_here: Callable[..., Any]) -> None:
    part = run.folder / "samples" / "x-1.parquet"  # of an older version
    part.write_bytes(b"PAR1 half a file")
    done = sweep_here("report", run.folder)
    assert done.exit_code == 2
    assert f"{part}: cannot be read" in done.output
    assert "Copy it again" in done.output
    assert not (run.folder / "report").exists()
