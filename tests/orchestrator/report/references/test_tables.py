"""Published numbers beside a run's own: the ratio, the doubts as notes, in every format and on the command line."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from orchestrator.analysis.results import Results, load_results
from orchestrator.api import load
from orchestrator.cli.commands.option_types import PublishedDevice
from orchestrator.cli.main import main
from orchestrator.common.errors import ConfigError
from orchestrator.report.charts.registry import Drawing
from orchestrator.report.formats.files import FORMATS, to_csv, to_latex, to_typst
from orchestrator.report.formats.latex import to_ascii_latex
from orchestrator.report.formats.markdown import Page, lay_out, notes_of, to_markdown
from orchestrator.report.page.cell_details import Details
from orchestrator.report.page.html import to_html
from orchestrator.report.references.devices import devices
from orchestrator.report.references.tables import against
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from tasks.spec.attempt import Attempt, Settings
from tasks.spec.outcome import Outcome
from tasks.spec.registry import make_cell
from tasks.spec.status import Status
from tasks.spec.tables import Sample
from tests.conftest import ROOT, with_samples

COURSE = {
    "vocab_size": 10_000,
    "size": "small",
    "context_length": 512,
    "batch_size": 4,
    "warmup_steps": 5,
}
MakeOutcome = Callable[..., Outcome]
MakeRun = Callable[..., Run]


@pytest.fixture
def run_of(tmp_path: Path) -> MakeRun:
    def make(*outcomes: Outcome) -> Run:
        run = Run(tmp_path / "run")
        with open_for_writing(run) as writer:
            writer.write_manifest({"name": "mine"})
            for one in outcomes:
                writer.append(one, None)
        return run

    return make


@pytest.fixture
def run(run_of: MakeRun, make_outcome: MakeOutcome) -> Run:
    """Steps of 80 ms eager, 64 ms compiled; out of memory at twice the context in fp32."""
    return run_of(
        make_outcome(step_ms=(80.0,), **COURSE),
        make_outcome(step_ms=(64.0,), compile="model", **COURSE),
        make_outcome(Status.OOM, **{**COURSE, "size": "2.7B"}),
    )


def page(results: Results, name: str, device: str = "h100") -> Page:
    (found,) = lay_out(results, [name], against(device))
    return found


def column(one: Page, title: str) -> list[str]:
    return [row[one.header.index(title)] for row in one.rows]


def test_ours_stands_beside_theirs_with_the_ratio(run: Run) -> None:
    """Theirs at small/512: 0.0827 s eager, 0.0566 s compiled and 0.0508 s with float32; 1.2463 s for 2.7B."""
    timings = page(load_results(run), "against-timings")
    assert column(timings, "size") == ["small"] * 3 + ["2.7B"]
    assert column(timings, "ours ms") == ["80.00", "64.00", "64.00", "OOM"]
    assert column(timings, "theirs ms") == ["82.70", "56.60", "50.80", "1246.3"]
    assert column(timings, "ours / theirs") == ["0.97", "1.13", "1.26", "–"]
    assert column(timings, "their TFLOP/s")[-1] == "34.2"


def test_the_interval_is_called_that_of_the_median_which_a_mean_may_lie_out_of(
    run_of: MakeRun, make_outcome: MakeOutcome
) -> None:
    """Theirs is a mean, and so is ours; one slow step of ten moves it."""
    timings = page(
        load_results(run_of(make_outcome(step_ms=(80.0,) * 9 + (180.0,), **COURSE))),
        "against-timings",
    )
    assert set(column(timings, "ours ms")) == {"90.00"}
    assert set(column(timings, "95 % interval of our median")) == {"80.00 to 80.00"}
    assert set(column(timings, "both are")) == {"means"}
    assert (
        "Ours is a mean where theirs is, else a median; the interval is of our median in either case"
        in timings.table.read
    )
    assert "95 % interval" not in timings.header


def test_doubts_are_notes_that_each_row_names(run: Run) -> None:
    timings = page(load_results(run), "against-timings")
    of_rows = [notes_of(timings, row) for row in timings.rows]
    assert (
        len(timings.notes)
        == len(set(timings.notes))
        == len({note for notes in of_rows for note in notes})
    )
    assert any("precision (fp32 or tf32)" in note for note in of_rows[0])
    assert not any("What is set with `float32`" in note for note in of_rows[1])
    assert any("What is set with `float32`" in note for note in of_rows[2])


def test_what_a_write_up_says_and_where_it_is_from(
    run_of: MakeRun, make_outcome: MakeOutcome
) -> None:
    results = load_results(run_of(make_outcome(**{**COURSE, "context_length": 256})))
    timings = page(results, "against-timings", "rtx-pro-6000")
    assert (
        "assignment report is CS336 2025, assignment 2, Assignment report (author not named)"
        in timings.table.read
    )
    assert all(
        "Said there: precision: dtype float32." in notes_of(timings, row) for row in timings.rows
    )


def test_a_time_beyond_the_hardware_says_so(run_of: MakeRun, make_outcome: MakeOutcome) -> None:
    results = load_results(run_of(make_outcome(compile="model", **{**COURSE, "size": "2.7B"})))
    timings = page(results, "against-timings")
    plain, with_float32 = (" ".join(notes_of(timings, row)) for row in timings.rows)
    assert "67 TFLOP/s in fp32" in with_float32
    assert "67 TFLOP/s in fp32" not in plain


def test_what_compiling_gains_is_compared_as_a_gain(run: Run) -> None:
    gains = page(load_results(run), "against-compile")
    assert column(gains, "ours") == ["1.25×"] * 2
    assert column(gains, "theirs") == ["1.46×", "1.63×"]


def test_what_a_narrow_precision_gains(run_of: MakeRun, make_outcome: MakeOutcome) -> None:
    cell = {**COURSE, "size": "large"}
    results = load_results(
        run_of(
            make_outcome(step_ms=(90.0,), **cell),
            make_outcome(step_ms=(30.0,), precision="bf16", **cell),
        )
    )
    gains = page(results, "against-precision", "not-named")
    forward = [row for row in gains.rows if row[gains.header.index("phase")] == "forward"]
    assert {row[gains.header.index("ours")] for row in forward} == {"3.00×"}
    assert [row[gains.header.index("theirs")] for row in forward] == [
        "1.85×",
        "1.86×",
    ]  # 0.286054 and 0.286982 s over 0.154221 s
    assert all(" over " in row[gains.header.index("published in")] for row in forward)


def attention(forward_ms: float, held_gib: float, **params: Any) -> Outcome:
    values = {"device": "cpu", "d_head": 64, "context_length": 8192, "batch_size": 8, **params}
    samples = (
        Sample("timing", "duration", "ms", forward_ms, "synced", "forward", 0),
        Sample("timing", "duration", "ms", 3 * forward_ms, "synced", "step", 0),
        Sample(
            "memory", "held_allocated_bytes", "bytes", held_gib * 1024**3, "steady", "forward", 0
        ),
        Sample(
            "memory",
            "peak_allocated_bytes",
            "bytes",
            2 * held_gib * 1024**3,
            "steady",
            "forward",
            0,
        ),
    )
    attempt = Attempt(make_cell("attention", values), 1, "/nowhere", Settings())
    return Outcome(attempt, Status.OK, "", "", {}, {"gpu": "Test GPU"}, samples, 1.7e9, 2.5)


def test_attention_and_its_memory(run_of: MakeRun) -> None:
    """Theirs at 64/8192: 1.3693 s of a hundred passes, 4336.75 MiB; printed twice, told once."""
    results = load_results(run_of(attention(10.0, 4.0), attention(1.0, 0.1, attention="flash")))
    times, memory = page(results, "against-attention"), page(results, "against-attention-memory")
    assert (
        column(times, "ours ms"),
        column(times, "theirs ms"),
        column(times, "ours / theirs"),
    ) == (
        ["10.00"],
        ["13.69"],
        ["0.73"],
    )
    assert (column(memory, "ours GiB"), column(memory, "theirs GiB")) == (["4.00"], ["4.24"])
    assert any("Taken as ms" in note for note in times.notes)
    assert not any("unit" in note for note in memory.notes)


def test_without_a_shape_there_is_no_ratio(run: Run) -> None:
    """Full steps of a write-up that says no context length: beside ours, and no more."""
    timings = page(load_results(run), "against-timings", "not-named")
    unsaid = [
        row for row in timings.rows if "section 1.2" in row[timings.header.index("published in")]
    ]
    assert {row[timings.header.index("theirs ms")] for row in unsaid} == {
        "48.47",
        "36.86",
        "15.87",
        "9.206",
        "174.4",
        "725.0",
    }
    assert {row[timings.header.index("ours / theirs")] for row in unsaid} == {"–"}
    assert all("Without a ratio" in " ".join(notes_of(timings, row)) for row in unsaid)


def test_on_what_of_a_machine_it_ran(run_of: MakeRun, make_outcome: MakeOutcome) -> None:
    results = load_results(run_of(make_outcome(**{**COURSE, "context_length": 256})))
    assert set(column(page(results, "against-timings", "macbook-air"), "there on")) == {
        "cpu",
        "mps",
    }
    assert "there on" not in page(results, "against-timings", "rtx-pro-6000").header


def test_sums(run_of: MakeRun) -> None:
    def adding(total: float, **params: Any) -> Outcome:
        attempt = Attempt(
            make_cell("accumulation", {"device": "cpu", **params}), 1, "/nowhere", Settings()
        )
        return Outcome(
            attempt, Status.OK, "", "", {}, {}, (Sample("finding", "sum", "1", total),), 1.7e9, 2.5
        )

    results = load_results(
        run_of(adding(9.953125, accumulator="fp16", addend="fp16"), adding(10.0, at_once=True))
    )
    sums = page(results, "against-accumulation", "not-named")
    assert set(column(sums, "theirs")) == {"9.953100000", "9.953125000"}
    assert len(sums.rows) == 4  # a write-up each; the sum at once is none of theirs


def test_every_format_says_the_same(run: Run) -> None:
    timings = page(load_results(run), "against-timings")
    for form in FORMATS.values():
        text = form(timings)
        numbers = [
            number
            for title in ("ours ms", "theirs ms", "ours / theirs")
            for number in column(timings, title)
        ]
        assert all(
            (to_ascii_latex(number) if form is to_latex else number) in text for number in numbers
        )
    assert "\n1. The unit is not said" in to_markdown(timings)
    assert r"\footnotesize 1. The unit is not said" in to_latex(timings)
    assert '#enum("The unit is not said' in to_typst(timings)
    _, first, *_ = csv.reader(io.StringIO(to_csv(timings)))
    assert first[-1].startswith("The unit is not said")  # in full: a spreadsheet has no foot


def test_typst_with_notes_compiles(run: Run, tmp_path: Path) -> None:
    typst = pytest.importorskip("typst")
    (tmp_path / "table.typ").write_text(to_typst(page(load_results(run), "against-timings")))
    assert typst.compile(str(tmp_path / "table.typ")).startswith(b"%PDF")


def test_the_page_has_the_notes(run: Run) -> None:
    results = load_results(run)
    html = "".join(
        to_html(
            results, 0, [], [page(results, "against-timings")], Drawing(), Details([], iter([]))
        )
    )
    assert '<ol class="notes">' in html
    assert "<code>float32</code>" in html


def report(run: Run, *words: str) -> Result:
    return CliRunner().invoke(main, ["report", str(run.folder), *words])


def test_the_command_prints_and_writes_them(run: Run) -> None:
    done = report(run, "--against", "h100", "--table", "timings")
    assert done.exit_code == 0
    assert re.findall(r"^## (.+)$", done.stdout, re.MULTILINE) == [
        "End to end",
        "Against h100: timings",
        "Against h100: what compiling gains",
    ]
    assert (run.folder / "report" / "against-timings.tex").exists()
    only = report(run, "--against", "h100", "--table", "against-compile", "--format", "csv")
    assert only.stdout.startswith("size,context_length,phase,published in,")
    assert "82.70" not in only.stdout


def test_as_a_frame_the_doubts_are_written_out(run: Run) -> None:
    frame = load(run.folder).table("against-timings", against="h100")
    assert list(frame["theirs ms"]) == [82.70, 56.60, 50.80, 1246.3]
    assert frame["doubts"].str.startswith("The unit is not said").all()
    with pytest.raises(ConfigError, match="Published are"):
        load(run.folder).table("against-timings", against="h20")


def test_shares_of_kernels(run_of: MakeRun, make_outcome: MakeOutcome) -> None:
    """Of the made kernels all are matrix products; theirs at small/512 in training: 53.5 %."""
    outcome = make_outcome(**{**COURSE, "measured_steps": 1})
    watched = Sample("kernels", "attributed_to_phase", "1", 1.0, "profiled", "", None)
    results = load_results(run_of(with_samples(outcome, watched)))
    shares = page(results, "against-gemm-share", "rtx5090")
    assert (column(shares, "ours"), column(shares, "theirs"), column(shares, "ours / theirs")) == (
        ["100.0%"],
        ["53.5%"],
        ["1.87"],
    )


def test_no_common_cell_is_said(run: Run) -> None:
    done = report(run, "--against", "apple-m4", "--table", "timings")
    assert done.exit_code == 0
    assert (
        "--against apple-m4: none of its 88 published numbers is of a cell of this run. There are attention d_head=256,1024"
        in done.stderr
    )
    assert "Against" not in done.stdout


def test_an_unknown_device_is_one_line(run: Run) -> None:
    done = report(run, "--against", "h20")
    assert done.exit_code == 2
    assert done.stderr.startswith("sweep: --against h20: no write-up is of it.")
    assert len(done.stderr.splitlines()) == 1


def test_the_devices_are_completed_and_listed() -> None:
    (option,) = (one for one in main.commands["report"].params if one.name == "against")
    assert isinstance(option.type, PublishedDevice)
    found = option.type.shell_complete(None, option, "rtx")  # type: ignore[arg-type]
    assert [item.value for item in found] == ["rtx5090", "rtx-pro-6000"]
    help_text = CliRunner().invoke(main, ["report", "--help"]).stdout
    assert all(word in help_text for word in devices())


@pytest.mark.parametrize("name", [table.name for table in against("h100")])
def test_every_table_stands_in_its_guide(name: str) -> None:
    assert f"`{name}`" in (ROOT / "docs" / "comparing.md").read_text()
