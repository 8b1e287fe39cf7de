"""The head of the page: what was measured on what, and how it ended."""

from __future__ import annotations

import pandas as pd

from orchestrator.analysis.results import Results
from orchestrator.common.units import GIB
from orchestrator.report.text.provenance import counts_by_status, headline, provenance
from tests.orchestrator.report.findings.test_findings import results_of, step


def test_the_headline_says_what_was_measured_on_what() -> None:
    peak = {"peak_allocated_bytes": GIB, "gpu": "NVIDIA H200"}
    cells = (step(10, **peak), {**step(float("nan"), **peak), "status": "oom"})
    training = "Training Transformers on one NVIDIA H200: time, memory, limits"
    assert headline(results_of(*cells)) == training
    on_a_cpu = step(10, device="cpu", task="accumulation")
    assert headline(results_of({**on_a_cpu, "step_ms_median": None})) == "Accumulation on a CPU"
    own = step(1, model="my_package.gpt:GPT", device="cpu")
    assert headline(results_of(own)) == "Training my_package.gpt:GPT on a CPU: time"
    resident = step(1, device="cpu", peak_rss_bytes=GIB)
    assert headline(results_of(resident)) == "Training Transformers on a CPU: time, memory"
    gpus = [step(1, gpu="H100", gpus=count) for count in (4, None, 4)]
    assert headline(results_of(gpus[0], gpus[2])) == "Training Transformers on 4 H100: time"
    assert headline(results_of(*gpus)) == "Training Transformers on 1 to 4 H100: time"
    two = headline(results_of(step(1, gpu="A100"), step(1, gpu="H200")))
    assert two == "Training Transformers on 2 kinds of GPU: time"
    assert headline(Results(pd.DataFrame(), (), {"name": "mine"})) == (
        "mine: nothing is measured yet"
    )


def test_the_line_below_a_table_names_the_runs_of_its_rows() -> None:
    cells = pd.concat([pd.DataFrame([{**step(1), "run": name}]) for name in "cadbe"])
    results = Results(cells, (), {"name": "all of them"})
    assert provenance(results) == "run c, a, d and 2 more"
    two = Results(cells[cells["run"].isin(["a", "b"])], (), {"name": "all of them"})
    assert provenance(two) == "run a, b"
    assert provenance(Results(cells.drop(columns="run"), (), {"name": "mine"})) == "run mine"


def test_statuses_are_counted_and_only_failures_are_bad() -> None:
    statuses = ["ok"] * 1200 + ["oom", "oom_inferred", "skipped", "crashed"]
    cells = pd.DataFrame({"status": statuses})
    assert counts_by_status(Results(cells, (), {}), pending=7) == [
        ("1,200 measured", "ok"), ("2 out of memory", "bad"), ("1 failed", "bad"),
        ("1 impossible", "quiet"), ("7 not measured", "quiet"),
    ]  # fmt: skip
