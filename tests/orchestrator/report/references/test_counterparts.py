"""Each table of each write-up has one of ours: by name, and in a run that has such a cell by a row of its own."""

from __future__ import annotations

import re

import pytest

from orchestrator.analysis.results import Results, load_results
from orchestrator.report.formats.markdown import Page, lay_out, notes_of
from orchestrator.report.references.devices import ALL, devices
from orchestrator.report.references.explanations import explanations
from orchestrator.report.references.records import Number, published
from orchestrator.report.references.schema import writeups
from orchestrator.report.references.tables import against, counterparts
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from tasks.spec.attempt import Attempt, Settings
from tasks.spec.outcome import Outcome
from tasks.spec.registry import make_cell
from tasks.spec.status import Status
from tasks.spec.tables import AllocationRow, KernelRow, Sample

TABLES = [(one.name, table.name) for one in writeups() for table in one.table]
REPEATED = {(one.name, table.name) for one in writeups() for table in one.table if table.repeats}
PHASES = ("forward", "backward", "optimizer", "step")
MODULES = ("scores", "softmax", "attention output")
PARTS = (*MODULES, "ffn", "norm", "embedding", "attention", "residual")


def cell_params(number: Number) -> dict[str, object]:
    """Of the first cell that a number may be of, on a GPU."""
    named = {axis: values[0] for axis, values in number.params.items()}
    base = {"size": "small", "context_length": 128} if number.task == "train_step" else {}
    if number.task == "attention" and "attention" not in named:
        base = {"attention": "naive"}
    return {"device": "cpu" if number.task == "accumulation" else "cuda", **base, **named}


def outcome_of(number: Number) -> Outcome:
    """As if it had been measured with every instrument: 10 ms a phase, 1 GiB of whatever takes memory."""
    attempt = Attempt(make_cell(number.task, cell_params(number)), 1, "/nowhere", Settings())
    timings = [Sample("timing", "duration", "ms", 10.0, "synced", phase, 0) for phase in PHASES]
    memory = [
        Sample("memory", f"{what}_allocated_bytes", "bytes", 2.0**30, mode, phase)
        for mode, phase in (
            ("built", ""),
            ("steady", "forward"),
            ("steady", "backward"),
            ("steady", "optimizer"),
        )
        for what in ("held", "peak")
    ]
    kept = [
        Sample("memory", metric, "bytes", 2.0**30, "steady", "")
        for metric in ("saved_bytes", "residual_stream_bytes")
    ]
    watched = [
        Sample("kernels", "attributed_to_phase", "1", 1.0, "profiled"),
        Sample("memory_snapshot", "peak_allocated_bytes", "bytes", 2.0**30, "steady"),
        Sample("finding", "sum", "1", 10.0),
    ]
    kernels = [
        KernelRow(
            phase,
            module,
            kind,
            "scope",
            "aten::mm",
            f"{module} {copy}",
            1,
            4,
            ns,
            1e6,
            1e6,
            1,
            2,
            0.5,
        )
        for phase in PHASES[:3]
        for copy in range(4)
        for module, kind, ns in zip(
            MODULES, ("GEMM", "softmax", "GEMM"), (10**6, 2 * 10**6, 3 * 10**6), strict=True
        )
    ]
    roles = [("activations", part) for part in PARTS] + [
        ("gradients", "ffn"),
        ("optimizer state", "ffn"),
    ]
    allocations = [
        AllocationRow("peak", "backward", role, part, "scope", "forward", "", 2**20, 12, 12 * 2**20)
        for role, part in roles
    ]
    samples = (*timings, *memory, *kept, *watched)
    measured = {"samples": samples, "kernels": tuple(kernels), "allocations": tuple(allocations)}
    return Outcome(attempt, Status.OK, "", "", {}, {}, started_at=1.7e9, wall_s=2.5, **measured)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A cell for each published table."""
    first: dict[tuple[str, str], Number] = {}
    for number in published():
        if number.amount is not None and number.metric != "parameters":
            first.setdefault((number.writeup, number.table), number)
    run = Run(tmp_path_factory.mktemp("counterparts") / "run")
    with open_for_writing(run) as writer:
        writer.write_manifest({"name": "ours"})
        outcomes = {one.attempt.cell.id: one for one in map(outcome_of, first.values())}
        for outcome in outcomes.values():
            writer.append(outcome, None)
    return load_results(run)


@pytest.fixture(scope="module")
def pages(results: Results) -> dict[str, Page]:
    return {page.table.name: page for page in lay_out(results, (), against(ALL))}


def test_every_published_table_is_listed_with_ours() -> None:
    found = counterparts()
    assert list(found) == TABLES
    assert all(found.values())
    assert {name for names in found.values() for name in names} == {
        table.name for table in against(ALL)
    }


@pytest.mark.parametrize("key", [key for key in TABLES if key not in REPEATED], ids=": ".join)
def test_every_published_table_has_a_row_beside_ours(
    key: tuple[str, str], pages: dict[str, Page]
) -> None:
    """With a ratio, wherever it says which size and length it is of."""
    writeup = key[0]
    (title,) = (
        table.title for one in writeups() for table in one.table if (one.name, table.name) == key
    )
    of_table = re.compile(rf"{re.escape(f'{writeup}: {title}')}(: .*|, .*)?")
    found = [pages[table] for table in counterparts()[key] if table in pages]
    beside = [
        (page, row)
        for page in found
        for row in page.rows
        if of_table.fullmatch(row[page.header.index("published in")])
    ]
    assert beside
    for page, row in beside:
        notes = notes_of(page, row)
        assert [note for note in notes if note.startswith("What differs in `")] == [
            explanations()[key]
        ]
        named = "Without a ratio" not in " ".join(notes)
        theirs = row[
            next(place for place, title in enumerate(page.header) if title.startswith("theirs"))
        ]
        ratio = row[page.header.index("ours / theirs")]
        assert (ratio != "–") is (named and theirs != "OOM") or theirs == "0.00"


def test_all_devices_stand_in_one_table(pages: dict[str, Page], results: Results) -> None:
    timings = pages["against-timings"]
    found = {row[timings.header.index("on")] for row in timings.rows}
    assert (
        {"H100 80 GB", "RTX 5090", "A100 40 GB", "MacBook Air"}
        <= found
        <= {device.name for device in devices().values()}
    )
    (one,) = lay_out(results, ["against-timings"], against("h100"))
    assert "on" not in one.header


def test_what_differs_is_said_of_each() -> None:
    said = explanations()
    assert list(said) == TABLES
    assert said["yyin-dev", "training-compiled"] == (
        "What differs in `torch_compile: Transformer benchmark (forward + backward + optimizer)`: H100 80 GB (peak TFLOP/s 67 in "
        "fp32, 494.5 in tf32, 989 in bf16, 3350 GB/s); in fp32 or tf32 (which is not said); a step with an optimizer (forward, "
        "backward and optimizer); batch 4; warm-up not said."
    )
    assert (
        "whether forward keeps a graph for a backward pass is not said"
        in said["analysis report", "timings"]
    )
    assert "0, 1, 5 steps of warm-up" in said["analysis report", "timings"]
    assert "in bf16; no optimizer" in said["assignment report", "timings-bf16"]
