"""Tables of step times: cells without warm-up, and of a single step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.analysis.results import load_results
from orchestrator.report.findings.registry import findings
from orchestrator.report.tables.registry import lay_out
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from tasks.spec.outcome import Outcome
from tasks.spec.tables import Sample
from tests.conftest import with_samples
from tests.support.tables import records_of_texts, texts_of

MakeOutcome = Callable[..., Outcome]


def test_the_total_of_a_cell_without_warm_up_is_that_of_its_first_steps(
    tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    """The steps that do not wait come later, when everything is warm."""

    def timed(warmup_steps: int) -> Outcome:
        cold = make_outcome(step_ms=(100.0, 20.0, 12.0), warmup_steps=warmup_steps)
        warm = [
            Sample("timing", "duration", "ms", 10.0, "pipelined", "step", step) for step in range(3)
        ]
        return with_samples(cold, *warm)

    with open_for_writing(Run(tmp_path / "run")) as writer:
        writer.write_manifest({"name": "run"})
        for warmup_steps in (0, 1):
            writer.append(timed(warmup_steps), None)
    (page,) = lay_out(load_results(Run(tmp_path / "run")), ["timings"])
    totals = {row[page.header.index("total")] for row in texts_of(page)}
    assert totals == {"44.00 ± 48.66", "10.00 ± 0.000"}
    cold, warm = sorted(records_of_texts(page), key=lambda row: row["warmup_steps"])
    # All statistics of a row are of the same steps.
    assert cold["total median [95 % interval]"].startswith("20.00 [")
    assert (cold["total n"], cold["total min"], cold["total std/mean"]) == ("3", "12.00", "110.60%")
    assert (warm["total min"], warm["total std/mean"]) == ("10.00", "0.00%")
    assert float(warm["tokens/s"].replace(",", "")) == pytest.approx(
        2 * float(cold["tokens/s"].replace(",", "")), abs=1
    )


def test_the_standard_deviation_of_one_sample_is_unknown(
    tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    with open_for_writing(Run(tmp_path / "run")) as writer:
        writer.write_manifest({"name": "run"})
        writer.append(make_outcome(step_ms=(10.0,)), None)
    results = load_results(Run(tmp_path / "run"))
    assert "step_ms_sd" not in results.cells or results.cells["step_ms_sd"].isna().all()
    (timings,) = lay_out(results, ["timings"])
    assert texts_of(timings)[0][timings.header.index("total")] == "10.00 ± –"
    assert "total std/mean" not in timings.header  # no row has one


def test_repetitions_show_their_median_and_range(tmp_path: Path, make_outcome: MakeOutcome) -> None:
    """The other columns are of the last attempt, and a cell measured once has no repetitions."""
    with open_for_writing(Run(tmp_path / "run")) as writer:
        writer.write_manifest({"name": "run"})
        for attempt, ms in enumerate((30.0, 10.0, 20.0), 1):
            writer.append(make_outcome(step_ms=(ms, ms + 1, ms - 1), number=attempt), None)
        writer.append(make_outcome(step_ms=(5.0,), context_length=64), None)
    results = load_results(Run(tmp_path / "run"))
    (page,) = lay_out(results, ["timings"])
    texts = [row["over repetitions"] for row in records_of_texts(page)]
    assert sorted(texts) == ["20.00 (10.00 to 30.00)", "–"]
    (only,) = [one for one in findings(results) if one.label == "over repetitions"]
    assert (only.number, only.interval, only.gain) == ("20.0", "10.0 to 30.0 ms", 1.0)
    assert "the median of 3 attempts that took 10.0 to 30.0 ms." in only.conclusion
    assert only.detail == "The slowest took 3.00× as long as the fastest."
