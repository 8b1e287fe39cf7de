"""The table `reference`: published numbers next to a run's own, in every format and on the command line."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from orchestrator.analysis.results import Results, load_results
from orchestrator.api import load
from orchestrator.cli.commands.option_types import ReferenceDevice
from orchestrator.cli.main import main
from orchestrator.common.errors import ConfigError
from orchestrator.common.reference_devices import DEVICES
from orchestrator.report.formats.files import FORMATS, to_csv, to_markdown
from orchestrator.report.formats.latex import to_ascii_latex
from orchestrator.report.page.html import RenderedReport, to_html
from orchestrator.report.references.tables import reference_tables
from orchestrator.report.tables.registry import lay_out
from orchestrator.report.tables.table import RenderedTable
from orchestrator.report.tables.views import view_of
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from tasks.spec.attempt import Attempt, Settings
from tasks.spec.outcome import Outcome
from tasks.spec.registry import make_cell
from tasks.spec.status import Status
from tasks.spec.tables import Sample
from tests.conftest import with_samples
from tests.support.tables import texts_of

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
    """Steps of 80 ms eager and 64 ms compiled, and a larger cell that ran out of memory."""
    return run_of(
        make_outcome(step_ms=(80.0,), **COURSE),
        make_outcome(step_ms=(64.0,), compile="model", **COURSE),
        make_outcome(Status.OOM, **{**COURSE, "size": "2.7B"}),
    )


def reference(results: Results, device: str = "h100") -> RenderedTable:
    (found,) = lay_out(results, ["reference"], reference_tables(device))
    return found


def records(page: RenderedTable, quantity: str = "") -> list[dict[str, str]]:
    rows = [dict(zip(page.header, row, strict=True)) for row in texts_of(page)]
    return [row for row in rows if row["quantity"].startswith(quantity)]


def notes_of(page: RenderedTable, text: str) -> list[str]:
    """Return the sentences that a row refers to by their numbers, such as `1, 3`."""
    return [] if text == "–" else [page.grid.notes[int(one) - 1] for one in text.split(", ")]


def column(page: RenderedTable, title: str, quantity: str = "") -> list[str]:
    return [row[title] for row in records(page, quantity)]


def test_ours_and_theirs_are_in_one_row_with_the_ratio(run: Run) -> None:
    """Theirs at small/512: 0.0827 s eager, 0.0566 s compiled and 0.0508 s with float32; 1.2463 s for 2.7B."""
    page = reference(load_results(run))
    assert page.header == ["cell", "quantity", "theirs", "ours", "ratio", "source", "note"]
    assert column(page, "cell") == [
        "train_step size=small context_length=512 compile=eager",
        *["train_step size=small context_length=512 compile=model"] * 2,
        "train_step size=2.7B context_length=512 compile=eager",
    ]
    assert set(column(page, "quantity")) == {"step mean (ms)"}
    assert column(page, "theirs") == ["82.70", "56.60", "50.80", "1246.3"]
    assert column(page, "ours") == ["80.00", "64.00", "64.00", "OOM"]
    assert column(page, "ratio") == ["0.97", "1.13", "1.26", "–"]
    assert texts_of(page)[2][5].startswith("yyin-dev: torch_compile: Transformer benchmark")
    assert texts_of(page)[2][5].endswith(": with float32 (H100 80 GB)")


def test_a_mean_has_its_standard_deviation(run_of: MakeRun, make_outcome: MakeOutcome) -> None:
    """The table prints the mean and the standard deviation of large/512 in two columns."""
    outcome = make_outcome(step_ms=(80.0,) * 9 + (180.0,), **{**COURSE, "size": "large"})
    page = reference(load_results(run_of(outcome)), "not-named")
    (row,) = (
        row for row in records(page, "forward mean") if "benchmarking_script" in row["source"]
    )
    assert re.fullmatch(r"\d+\.\d ± \d\.\d+", row["theirs"])
    assert row["ours"] == "90.00 ± 31.62"


def test_notes_are_numbered_and_each_row_names_its_own(run: Run) -> None:
    page = reference(load_results(run))
    rows = [notes_of(page, row[-1]) for row in texts_of(page)]
    assert len(page.grid.notes) == len(set(page.grid.notes))
    assert set(page.grid.notes) == {note for notes in rows for note in notes}
    assert any("Not stated: precision (fp32 or tf32)" in note for note in rows[0])
    assert any("what the column `with float32` sets" in note for note in rows[2])


def test_the_text_names_the_write_ups(run: Run) -> None:
    table = reference(load_results(run)).table
    assert table.title == "Published on H100 80 GB"
    assert "yyin-dev: CS336 2025" in table.read


def attention(forward_ms: float, held_gib: float, **params: Any) -> Outcome:
    values = {"device": "cpu", "d_head": 64, "context_length": 8192, "batch_size": 8, **params}
    held = held_gib * 1024**3
    samples = (
        Sample("timing", "duration", "ms", forward_ms, "synced", "forward", 0),
        Sample("timing", "duration", "ms", 3 * forward_ms, "synced", "step", 0),
        Sample("memory", "held_allocated_bytes", "bytes", held, "steady", "forward", 0),
        Sample("memory", "peak_allocated_bytes", "bytes", 2 * held, "steady", "forward", 0),
    )
    attempt = Attempt(make_cell("attention", values), 1, "/nowhere", Settings())
    return Outcome(attempt, Status.OK, "", "", {}, {"gpu": "Test GPU"}, samples, 1.7e9, 2.5)


def test_a_number_that_is_printed_twice_has_one_row(run_of: MakeRun) -> None:
    """Theirs at 64/8192: 1.3693 s for a hundred passes, 4336.75 MiB; the write-up prints both in two tables."""
    page = reference(
        load_results(run_of(attention(10.0, 4.0), attention(1.0, 0.1, attention="flash")))
    )
    (time,), (memory,) = records(page, "forward mean"), records(page, "memory after forward")
    assert (time["theirs"], time["ratio"]) == ("13.69", "0.73")
    assert (memory["theirs"], memory["ours"]) == ("4.24", "4.00")
    assert any("As milliseconds, the long contexts" in note for note in page.grid.notes)


def test_there_is_no_ratio_without_a_stated_shape(run: Run) -> None:
    """The full steps of `section 1.2` do not state a context length."""
    page = reference(load_results(run), "not-named")
    unstated = [row for row in records(page) if row["source"].startswith("section 1.2")]
    assert {row["theirs"].split(" ")[0] for row in unstated} >= {"48.47", "36.86", "15.87", "725.0"}
    assert {row["ratio"] for row in unstated} == {"–"}
    assert any("No ratio, because shapes may differ" in note for note in page.grid.notes)


def test_the_source_names_cpu_and_mps(run_of: MakeRun, make_outcome: MakeOutcome) -> None:
    results = load_results(run_of(make_outcome(**{**COURSE, "context_length": 256})))
    sources = set(column(reference(results, "macbook-air"), "source"))
    assert {source.rpartition("(")[2] for source in sources} == {
        "MacBook Air, cpu)",
        "MacBook Air, mps)",
    }


def test_sums_and_their_errors(run_of: MakeRun) -> None:
    def adding(total: float, **params: Any) -> Outcome:
        cell = make_cell("accumulation", {"device": "cpu", **params})
        attempt = Attempt(cell, 1, "/nowhere", Settings())
        samples = (
            Sample("finding", "sum", "1", total),
            Sample("finding", "error", "1", total - 10.0),
        )
        return Outcome(attempt, Status.OK, "", "", {}, {}, samples, 1.7e9, 2.5)

    narrow = adding(9.953125, accumulator="fp16", addend="fp16")
    page = reference(load_results(run_of(narrow, adding(10.0, at_once=True))), "not-named")
    assert sorted(column(page, "theirs", "sum")) == ["9.953100000"] * 3 + ["9.953125000"]
    assert column(page, "ours", "error") == ["0.046875000"]


def test_shares_and_parts_from_kernels(run_of: MakeRun, make_outcome: MakeOutcome) -> None:
    """Theirs at small/512 in training: matrix products take 53.5 %."""
    outcome = make_outcome(**{**COURSE, "measured_steps": 1})
    watched = Sample("kernels", "attributed_to_phase", "1", 1.0, "profiled", "", None)
    page = reference(load_results(run_of(with_samples(outcome, watched))), "rtx5090")
    (share,) = records(page, "share of matrix products")
    assert (share["ours"], share["theirs"], share["ratio"]) == ("100.0%", "53.5%", "1.87")


def test_ranks_and_parts_of_kernels() -> None:
    from orchestrator.analysis.kernels import TimedKernel
    from orchestrator.report.references.counterparts import COUNTERPARTS, NOT_GEMM

    rows = [
        ("a", "forward", "GEMM", "scores", 3.0),
        ("b", "forward", "GEMM", "attention output", 1.0),
        ("c", "forward", "softmax", "softmax", 2.0),
        ("c", "backward", "softmax", "softmax", 2.0),
    ]
    figures: Any = SimpleNamespace(
        kernels={"x": [TimedKernel(*row, *[1.0] * 8) for row in rows]}, results=None
    )

    def ours(metric: str, phase: str = "", **labels: str) -> float | None:
        number: Any = SimpleNamespace(phase=phase, labels=labels)
        return COUNTERPARTS[metric].ours(number, {"cell": "x"}, figures)

    assert ours("gemm_share") == 0.5
    shares = [ours("kernel_share", "forward", rank=rank) for rank in "124"]
    assert shares == [0.5, 2 / 6, None]
    assert ours("kernel_share", "forward", among=NOT_GEMM, rank="1") == 2 / 6
    assert ours("kernel_share", rank="1") == 0.5  # both passes: `c` takes 4 of 8 ms
    assert ours("part_time", "forward", part="matmul") == 4.0
    assert ours("part_time", "backward", part="matmul") is None


def test_every_format_prints_the_same_numbers(run: Run) -> None:
    page = reference(load_results(run))
    for name, form in FORMATS.items():
        text = form(page)
        for number in [*column(page, "theirs"), *column(page, "ratio")]:
            if name == "csv":
                is_number = number[:1].isdigit()
                assert (
                    not is_number or f"{float(number.partition(' ')[0].rstrip('†')):g}"[:3] in text
                )
            else:
                assert (to_ascii_latex(number) if name == "tex" else number) in text


def test_markdown_has_numbered_notes_and_csv_has_them_in_full(run: Run) -> None:
    page = reference(load_results(run))
    assert f"\n1. {page.grid.notes[0]}" in to_markdown(view_of(page))
    rows = list(csv.DictReader(io.StringIO(to_csv(page))))
    assert [row["note"] for row in rows] == [
        " ".join(notes_of(page, row[-1])) for row in texts_of(page)
    ]


def test_the_page_has_numbered_notes(run: Run) -> None:
    results = load_results(run)
    page = reference(results)
    html = "".join(to_html(RenderedReport(results, [], [page], [], "RUN"), [], {}))
    assert '<ol class="notes">' in html
    assert "<code>with float32</code>" in html


def report(run: Run, *words: str) -> Result:
    return CliRunner().invoke(main, ["report", str(run.folder), *words])


def test_the_command_prints_and_writes_the_table(run: Run) -> None:
    done = report(run, "--reference", "h100", "--table", "timings")
    assert done.exit_code == 0
    assert re.search(r"^Step time$.+^Published on H100 80 GB$", done.stdout, re.M | re.S)
    assert (run.folder / "report" / "reference.tex").exists()
    only = report(run, "--reference", "h100", "--table", "reference", "--format", "csv")
    assert only.stdout.startswith("cell,quantity,theirs,ours,")


def test_the_frame_has_numbers_and_full_notes(run: Run) -> None:
    frame = load(run.folder).table("reference", reference="h100")
    assert list(frame["theirs"]) == [82.70, 56.60, 50.80, 1246.3]
    assert frame["note"].str.startswith("The unit is not stated").all()
    with pytest.raises(ConfigError, match="no write-up has numbers"):
        load(run.folder).table("reference", reference="h20")


def test_a_run_without_a_common_cell_gets_a_message(run: Run) -> None:
    done = report(run, "--reference", "apple-m4", "--table", "timings")
    assert done.exit_code == 0
    assert (
        "--reference apple-m4: none of its 88 published numbers belongs to a cell of this run. "
        "They cover attention d_head=256,1024" in done.stderr
    )
    assert "Published" not in done.stdout


def test_an_unknown_device_is_an_error_of_one_line(run: Run) -> None:
    done = report(run, "--reference", "h20")
    assert done.exit_code == 2
    assert done.stderr.startswith("sweep: --reference h20: no write-up has numbers for it.")
    assert len(done.stderr.splitlines()) == 1


def test_the_devices_are_completed_and_listed_in_the_help() -> None:
    (option,) = (one for one in main.commands["report"].params if one.name == "reference")
    assert isinstance(option.type, ReferenceDevice)
    found = option.type.shell_complete(None, option, "rtx")  # type: ignore[arg-type]
    assert [item.value for item in found] == ["rtx5090", "rtx-pro-6000"]
    help_text = CliRunner().invoke(main, ["report", "--help"]).stdout
    assert all(word in help_text for word in DEVICES)
