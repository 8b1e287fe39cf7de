"""Traces and snapshots of other programs become cells of a run."""

from __future__ import annotations

import gzip
import json
import pickle
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import Result

from orchestrator import load
from orchestrator.analysis.results import load_results
from orchestrator.common.errors import PlatformError, RunError
from orchestrator.report.tables.registry import lay_out
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from orchestrator.sweep import trace_import
from orchestrator.sweep.outcome_log import store_cells
from orchestrator.sweep.trace_import import ImportOptions, import_file
from tasks.spec.outcome import Outcome
from tests.support.tables import texts_of
from tests.support.traces import AUTOGRAD, KinetoTrace, NsysExport, training_step

SweepHere = Callable[..., Result]
SGEMM = "ampere_sgemm_128x64_tn"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
ADAM = "void at::native::multi_tensor_apply_kernel<at::native::TensorListMetadata<4>>"
NS_PER_MS = 1_000_000


@pytest.fixture(autouse=True)
def _no_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing cells.parquet takes longer than an import; the reader derives the cells without it."""
    monkeypatch.setattr(trace_import, "store_cells", lambda writer: {})


@pytest.fixture
def export(tmp_path: Path) -> Path:
    written = NsysExport(tmp_path / "report1.sqlite")
    written.range("forward", 0, 100_000)
    written.range("computing softmax", 10_000, 40_000)
    written.kernel("void softmax_warp_forward<float>", 20_000, 50_000, 60_000)
    written.kernel(SGEMM, 50_000, 60_000, 90_000)
    written.range("backward", 110_000, 200_000)
    written.kernel("ampere_sgemm_128x64_nn", 120_000, 130_000, 190_000, AUTOGRAD)
    return written.path


def imported(file: Path, run: Run, **options: Any) -> str:
    (cell,) = import_file(file, run, ImportOptions(**options)).cells
    return cell


def test_an_export_becomes_a_run(export: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    cell = imported(export, run)
    kernels = run.read("kernels").set_index("name")
    softmax = kernels.loc["void softmax_warp_forward<float>"]
    assert (softmax["phase"], softmax["module"]) == ("forward", "computing softmax")
    assert (softmax["kernel_class"], softmax["total_ns"]) == ("softmax", 10_000)
    assert kernels.loc["ampere_sgemm_128x64_nn", "phase"] == "backward"
    results = load_results(run)
    (row,) = results.cells.to_dict("records")
    assert (row["cell"], row["task"], row["file"]) == (cell, "nsys", "report1.sqlite")
    assert row["attributed_to_phase"] == 1.0
    assert row["attributed_to_module"] == pytest.approx(0.1)
    assert results.kernels()["ms"].sum() == pytest.approx(0.1)


def test_an_imported_trace_joins_a_run_and_a_second_import_is_another_attempt(
    export: Path, tmp_path: Path, make_outcome: Callable[..., Outcome]
) -> None:
    run = Run(tmp_path / "run")
    with open_for_writing(run) as writer:
        writer.write_manifest({"name": "mine"})
        writer.append(make_outcome(), None)
    imported(export, run)
    cell = imported(export, run)
    assert run.read_manifest()["name"] == "mine"
    attempts = run.read("attempts")
    assert sorted(attempts.loc[attempts["task"] == "nsys", "attempt"]) == [1, 2]
    assert list(load_results(run).kernels()["cell"]).count(cell) == 3  # of the attempt that counts


def test_an_import_writes_the_row_of_each_cell(
    export: Path,
    tmp_path: Path,
    make_outcome: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trace_import, "store_cells", store_cells)
    run = Run(tmp_path / "run")
    with open_for_writing(run) as writer:
        writer.write_manifest({"name": "run"})
        writer.append(make_outcome(), None)
    imported(export, run)
    stored = pd.read_parquet(run.folder / "cells.parquet")
    assert set(stored["cell"]) == set(load_results(run).cells["cell"])
    assert len(stored) == 2


def test_another_file_of_the_same_name_is_another_cell(export: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    first = imported(export, run)
    (tmp_path / "other").mkdir()
    other = NsysExport(tmp_path / "other" / export.name)
    other.kernel("void relu", 10, 20, 30)
    second = imported(other.path, run)
    assert first != second
    assert list(run.read("attempts")["attempt"]) == [1, 1]
    assert set(load_results(run).kernels()["cell"]) == {first, second}


def test_the_path_of_each_imported_file_is_shown(tmp_path: Path, sweep_here: SweepHere) -> None:
    files = [f"iteration_{number}/rank0_trace.json" for number in (10, 20)]
    for number, file in enumerate(files):
        (tmp_path / file).parent.mkdir()
        trace = training_step()
        trace.kernel("extra", 20, 360, 370 + number)
        trace.write(tmp_path / file)
    done = sweep_here("import", *files, "--out", "run")
    shown = sweep_here("show", "run").stdout
    for file in files:
        (stored,) = [line for line in done.output.splitlines() if line.startswith(f"{file} is")]
        cell = stored.split()[-1]
        (line,) = [line for line in shown.splitlines() if line.endswith(f"from {file}")]
        assert line.startswith(cell)


@pytest.mark.parametrize("folder", ["a?mode=rwc", "a#b", "50%25", "%3f"])
def test_a_path_may_contain_special_characters_of_addresses(
    folder: str, export: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / folder).mkdir()
    named = export.rename(tmp_path / folder / "r?#%.sqlite")
    monkeypatch.chdir(tmp_path)
    imported(named.relative_to(tmp_path), Run(tmp_path / "run"))
    assert len(Run(tmp_path / "run").read("kernels")) == 3


def kernel_event(**times: float) -> bytes:
    return json.dumps({"traceEvents": [{"cat": "kernel", "name": SGEMM, **times}]}).encode()


def allocation(size: float) -> bytes:
    event = {"action": "alloc", "addr": 1, "size": size, "time_us": 1}
    return pickle.dumps({"segments": [], "device_traces": [[event]]})


@pytest.mark.parametrize("times", [(20, 10), ("a", "b"), (0, 2**62), (0.5, 1.5)])
def test_an_export_with_invalid_times_is_refused(times: Any, tmp_path: Path) -> None:
    export = NsysExport(tmp_path / "odd.sqlite")
    export.kernel(SGEMM, None, *times)
    with pytest.raises(RunError, match=r"not an export .*: a span of time in it is invalid"):
        import_file(export.path, Run(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.sqlite", None, "does not exist"),
        (".", None, "is a folder"),
        ("text.sqlite", b"no database at all", "is neither a trace nor a memory snapshot"),
        ("empty.json", b"", "is neither a trace nor a memory snapshot"),
        ("torn.sqlite", b"SQLite format 3\0" + b"x" * 100, "not an export of Nsight Systems"),
        ("other.json", b'{"events": []}', "not a trace of torch.profiler"),
        (
            "torn.json.gz",
            gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9],
            "not a trace of torch",
        ),
        ("nothing.json", b'{"traceEvents": []}', "contains neither kernels nor operators"),
        ("torn.pickle", pickle.dumps({"segments": []})[:-5], "not a memory snapshot"),
        ("list.pickle", pickle.dumps([1, 2]), "it has no segments and device_traces"),
        ("odd.pickle", pickle.dumps({"segments": [1], "device_traces": []}), "not a memory snap"),
        ("backwards.json", kernel_event(ts=1, dur=-5), "invalid: 1000 to -4000 ns"),
        ("endless.json", kernel_event(ts=1, dur=1e30), "a span of time in it is invalid"),
        ("infinite.json", kernel_event(ts=1e308, dur=1), "an event in it has no time"),
        ("undated.json", kernel_event(ts=1), "an event in it has no time"),
        ("negative.pickle", allocation(size=-5), "-5 in it is neither a time nor a size"),
        ("huge.pickle", allocation(size=10**30), "0 in it is neither a time nor a size"),
        ("half.pickle", allocation(size=0.5), "0.5 in it is neither a time nor a size"),
    ],
)
def test_a_file_of_another_kind_is_refused(
    name: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(RunError, match=message):
        import_file(tmp_path / name, Run(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


class Evil:
    def __reduce__(self) -> Any:
        return open, ("executed", "w")


def test_nothing_in_a_pickle_is_executed(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("evil.pickle").write_bytes(pickle.dumps({"segments": [Evil()], "device_traces": []}))
    with pytest.raises(RunError, match=r"it names .*open, which is not read for safety"):
        import_file(Path("evil.pickle"), Run(tmp_path / "run"))
    assert not Path("executed").exists()


def test_a_report_without_nsys_says_how_to_export_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "report1.nsys-rep").write_bytes(b"binary")
    with pytest.raises(PlatformError, match=r"nsys export --type sqlite report1\.nsys-rep"):
        import_file(tmp_path / "report1.nsys-rep", Run(tmp_path / "run"))


def test_a_report_is_exported_by_an_installed_nsys(
    export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # nsys is a script here, which copies an export. Its options are the documented ones.
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "nsys"
    script.write_text(
        f'#!/bin/sh\n[ "$1 $2 $3 $4" = "export --type sqlite --output" ] && cp {export} "$5"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    (tmp_path / "report1.nsys-rep").write_bytes(b"binary")
    imported(tmp_path / "report1.nsys-rep", Run(tmp_path / "run"))
    assert len(Run(tmp_path / "run").read("kernels")) == 3


STYLES = {
    "title": ("Forward Pass", "Backward Pass", "Optimizer Step"),
    "snake": ("forward_pass", "backward_pass", "optimizer_step"),
    "numbered": ("forward_0", "backward_0", "optimizer_0"),
    "short": ("fwd", "bwd", "opt"),
    "chosen": ("one", "two", "three"),
}


@pytest.mark.parametrize("style", STYLES)
def test_ranges_of_usual_names_are_phases(style: str, tmp_path: Path) -> None:
    trace = NsysExport(tmp_path / "report.sqlite")
    for index, name in enumerate(STYLES[style]):
        trace.range(name, 1000 * index, 1000 * index + 999)
    trace.kernel(SGEMM, 100, 500, 900)
    trace.kernel(ADD, 200, 900, 1000)
    trace.kernel(SGEMM, 1100, 1500, 2700, AUTOGRAD)
    trace.kernel(ADAM, 2100, 3300, 3600)
    chosen = dict(zip(STYLES["chosen"], ("forward", "backward", "optimizer"), strict=True))
    run = Run(tmp_path / "run")
    imported(trace.path, run, phases=chosen if style == "chosen" else {})
    totals = load(run.folder).kernels.groupby("phase")["total_ns"].sum()
    assert totals.to_dict() == {"forward": 500, "backward": 1200, "optimizer": 300}
    assert load_results(run).cells["attributed_to_phase"].tolist() == [1.0]
    assert set(load(run.folder).kernels["module"]) == {"", "optimizer"}


def test_ranges_without_a_phase_are_listed_with_the_remedy(
    tmp_path: Path, sweep_here: SweepHere
) -> None:
    trace = NsysExport(tmp_path / "report.sqlite")
    trace.range("vorwaerts", 0, 999)
    trace.kernel(SGEMM, 100, 500, 900)
    done = sweep_here("import", trace.path, "--out", "run")
    assert done.exit_code == 0
    first, second = done.stderr.splitlines()
    assert "no range is a phase: its ranges are vorwaerts." in first
    assert first.endswith("name others with --phase NAME=forward")
    assert "State it with --steps N" in second
    mapped = sweep_here("import", trace.path, "--out", "run", "--phase", "vorwaerts=forward")
    assert mapped.stderr == ""
    wrong = sweep_here("import", trace.path, "--out", "run", "--phase", "vorwaerts=vor")
    assert (wrong.exit_code, len(wrong.stderr.splitlines())) == (2, 1)


def whole_graphs(path: Path) -> Path:
    trace = NsysExport(path)
    for index, name in enumerate(("forward", "backward")):
        trace.range(name, 1000 * index, 1000 * index + 999)
        trace.kernel("graph", 1000 * index + 100, 1000 * index + 200, 1000 * index + 900)
    trace.range("optimizer", 2000, 2999)
    trace.kernel(ADAM, 2100, 2200, 2300)
    # The table of whole graphs has the columns of the table of kernels that are read.
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(
            """CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE AS SELECT * FROM
               CUPTI_ACTIVITY_KIND_KERNEL WHERE start < 2000"""
        )
        database.execute("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE start < 2000")
    return path


def test_kernels_of_a_graph_traced_as_a_whole_are_unknown(
    tmp_path: Path, sweep_here: SweepHere
) -> None:
    done = sweep_here("import", whole_graphs(tmp_path / "graphs.sqlite"), "--out", "run")
    assert "2 CUDA graphs were traced as a whole, so their kernels are unknown" in done.stderr
    assert done.stderr.endswith("--cuda-graph-trace=node\n")
    classes, top = lay_out(load_results(Run(Path("run"))), ["kernel-classes", "kernels"])
    assert "GEMM share" not in classes.header
    shares = {row[0]: row[classes.header.index("optimizer share")] for row in texts_of(classes)}
    assert shares == {
        "forward": "–", "backward": "–", "optimizer": "100.0%", "forward + backward": "–",
        "step": "≥ 6.7%",
    }  # fmt: skip
    step = [row[top.header.index("class")] for row in texts_of(top) if row[0] == "step"]
    assert step == ["other", "optimizer"]  # the longest one that is known to be no matrix product


def test_unknown_kernels_make_shares_of_classes_lower_bounds(tmp_path: Path) -> None:
    trace = NsysExport(tmp_path / "report.sqlite")
    trace.range("forward", 0, 999)
    trace.kernel(SGEMM, 100, 500, 600)
    trace.kernel("mystery", 200, 600, 900)
    imported(trace.path, Run(tmp_path / "run"))
    classes, top = lay_out(load_results(Run(tmp_path / "run")), ["kernel-classes", "kernels"])
    (row,) = texts_of(classes)
    assert row[classes.header.index("GEMM share")] == "≥ 25.0%"
    assert row[classes.header.index("other share")] == "75.0%"
    assert [row[top.header.index("name")] for row in texts_of(top)] == ["mystery", SGEMM]


def ten_steps(path: Path, warmup: bool = False, ranges: bool = True) -> Path:
    """Kernels of 2 ms in forward, 3 ms in backward and 1 ms in the optimizer, in each step."""
    trace = NsysExport(path)
    if warmup:
        trace.range("Warmup Phase", 0, 20 * NS_PER_MS - 1)
        trace.range("Benchmarking Phase", 20 * NS_PER_MS, 200 * NS_PER_MS)
    for step in range(12 if warmup else 10):
        begin = 10 * step * NS_PER_MS
        kinds = ((SGEMM, 0, 2), (SGEMM, 3, 3), (ADAM, 7, 1))
        for name, (kernel, start, ms) in zip(
            ("forward", "backward", "optimizer"), kinds, strict=True
        ):
            at = begin + start * NS_PER_MS
            if ranges:
                trace.range(name, at, at + 3 * NS_PER_MS - 1)
            trace.kernel(kernel, at + 100, at + 200, at + 200 + ms * NS_PER_MS)
    return path


@pytest.mark.parametrize("warmup", [False, True])
def test_values_are_those_of_one_step_and_warm_up_is_left_out(warmup: bool, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    imported(ten_steps(tmp_path / "ten.sqlite", warmup), run)
    kernels = load(run.folder).kernels
    assert set(kernels["steps"]) == {10}
    assert set(kernels["module"]) == {"", "optimizer"}
    (classes,) = lay_out(load_results(run), ["kernel-classes"])
    ms = {row[0]: row[classes.header.index("kernel ms")] for row in texts_of(classes)}
    assert ms == {
        "forward": "2.000", "backward": "3.000", "optimizer": "1.000", "forward + backward": "5.000",
        "step": "6.000",
    }  # fmt: skip
    assert load_results(run).cells["idle_ms"].tolist() == [pytest.approx(3.8, abs=0.3)]


def test_without_the_number_of_steps_values_are_those_of_the_whole_trace(
    tmp_path: Path, sweep_here: SweepHere
) -> None:
    file = ten_steps(tmp_path / "ten.sqlite", ranges=False)
    done = sweep_here("import", file, "--out", "run")
    assert "the number of its steps is not known" in done.stderr
    run = load("run")
    assert run.kernels["steps"].isna().all()
    assert run.kernels["ms"].isna().all()
    assert "idle_ms" not in run.cells or run.cells["idle_ms"].isna().all()
    (top,) = lay_out(load_results(Run(Path("run"))), ["kernels"])
    assert {row[0] for row in texts_of(top)} == {"outside, whole trace"}
    stated = sweep_here("import", file, "--out", "stated", "--steps", 10)
    assert "not known" not in stated.stderr
    assert load("stated").kernels["ms"].sum() == pytest.approx(6.0)


def test_processes_and_gpus_are_cells_of_their_own(tmp_path: Path) -> None:
    """The backward pass of one process says nothing about the kernels of another."""
    trace = NsysExport(tmp_path / "ranks.sqlite")
    trace.range("forward", 0, 999)
    trace.kernel(SGEMM, 100, 200, 300)
    trace.kernel(ADD, 150, 200, 300, process=4243)
    result = import_file(trace.path, Run(tmp_path / "run"))
    cells = load_results(Run(tmp_path / "run")).cells.set_index("cell")
    assert cells.loc[list(result.cells), "rank"].tolist() == [
        "process 4242, GPU 0",
        "process 4243, GPU 0",
    ]
    kernels = load(tmp_path / "run").kernels
    assert dict(zip(kernels["name"], kernels["phase"], strict=True)) == {SGEMM: "forward", ADD: ""}


def kineto(step_name: str = "ProfilerStep#3") -> dict[str, Any]:
    def event(category: str, name: str, start: float, took: float, **args: Any) -> dict[str, Any]:
        place = {"pid": 7, "tid": 7, "ts": start, "dur": took}
        return {"ph": "X", "cat": category, "name": name, **place, "args": args}

    return {
        "traceEvents": [
            event("user_annotation", step_name, 0, 900),
            event("cpu_op", "aten::mm", 10, 40, **{"Sequence number": 1, "Fwd thread id": 0}),
            event("cuda_runtime", "cudaLaunchKernel", 20, 5, correlation=1),
            event("kernel", SGEMM, 60, 300.5, correlation=1, device=0, stream=7),
        ]
    }


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz", "renamed.txt", "bom.json"])
def test_a_trace_of_torch_profiler_is_recognised_by_its_content(name: str, tmp_path: Path) -> None:
    text = json.dumps(kineto()).encode("utf-8-sig" if name == "bom.json" else "utf-8")
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    run = Run(tmp_path / "run")
    imported(tmp_path / name, run)
    (row,) = load(run.folder).kernels.to_dict("records")
    assert (row["total_ns"], row["kernel_class"], row["operator"]) == (300_500, "GEMM", "aten::mm")
    assert row["steps"] == 1
    assert load(run.folder).cells["task"].tolist() == ["kineto"]


def test_older_categories_and_numbers_written_as_texts_are_read(tmp_path: Path) -> None:
    older = {"cpu_op": "Operator", "cuda_runtime": "Runtime", "kernel": "Kernel"}
    trace = kineto()
    for event in trace["traceEvents"]:
        event["cat"] = older.get(event["cat"], event["cat"])
        event["args"] = {key: str(value) for key, value in event["args"].items()}
    (tmp_path / "old.json").write_text(json.dumps(trace))
    run = Run(tmp_path / "run")
    imported(tmp_path / "old.json", run)
    (row,) = load(run.folder).kernels.to_dict("records")
    assert (row["total_ns"], row["operator"]) == (300_500, "aten::mm")


def test_user_annotations_of_torch_profiler_are_phases_and_modules(tmp_path: Path) -> None:
    trace = KinetoTrace()
    for index, name in enumerate(("Forward Pass", "attention", "Backward Pass")):
        times = [(0, 100), (5, 50), (110, 200)][index]
        trace._host("user_annotation", name, *times, 100, {})
    trace.kernel(SGEMM, 10, 20, 30)
    trace.kernel(ADD, 120, 130, 140, AUTOGRAD)
    run = Run(tmp_path / "run")
    imported(trace.write(tmp_path / "trace.json"), run)
    kernels = load(run.folder).kernels.set_index("name")
    assert kernels.loc[SGEMM, ["phase", "module"]].tolist() == ["forward", "attention"]
    assert kernels.loc[ADD, ["phase", "module"]].tolist() == ["backward", ""]


def event(category: str, name: str, start: float, **args: Any) -> dict[str, Any]:
    place = {"pid": 7, "tid": 7, "ts": start, "dur": 40}
    return {"ph": "X", "cat": category, "name": name, **place, "args": args}


MUON = event("user_annotation", "Optimizer.step#Muon.step", 0)
LAUNCHED = event("xpu_runtime", "urEnqueueKernelLaunch", 10, correlation=1)
MISSING = {
    "phases": ([MUON, event("cpu_op", "aten::mm", 100)], "no range is forward or backward: it has"),
    "launches": (
        [MUON, event("kernel", SGEMM, 60, correlation=9)],
        "1 of its 1 kernels and copies",
    ),
    "kernels": ([MUON, event("cpu_op", "aten::mm", 10), LAUNCHED], "has launches but no kernels"),
    "order": (
        [
            {**event("xpu_runtime", "launch", 10, correlation=1), "pid": 1},
            {**event("user_annotation", "forward", 0), "pid": 2},
            {**event("user_annotation", "forward", 0), "pid": 1},
            {**event("xpu_runtime", "launch", 20, correlation=1), "pid": 2},
            event("kernel", SGEMM, 60, correlation=1),
            event("kernel", SGEMM, 160, correlation=1),
        ],
        "split by the order in time",
    ),
}


@pytest.mark.parametrize(("events", "note"), MISSING.values(), ids=MISSING)
def test_notes_name_what_a_trace_lacks(
    events: list[dict[str, Any]], note: str, tmp_path: Path
) -> None:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": events}))
    assert note in " ".join(import_file(file, Run(tmp_path / "run")).notes)


def test_a_trace_that_lacks_nothing_has_no_notes(tmp_path: Path) -> None:
    file = training_step().write(tmp_path / "trace.json")
    assert import_file(file, Run(tmp_path / "run")).notes == ()


FRAMES = [{"filename": "/home/me/train.py", "line": 7, "name": "step"}]
BLOCK = {"address": 8192, "size": 1024, "requested_size": 1000, "state": "active_allocated"}
SNAPSHOT = {
    "segments": [{"device": 0, "blocks": [BLOCK]}],
    "device_traces": [
        [
            {"action": "alloc", "addr": 4096, "size": 4096, "time_us": 11, "frames": FRAMES},
            {"action": "alloc", "addr": 8192, "size": 1000, "time_us": 12, "frames": FRAMES},
            {"action": "free_completed", "addr": 4096, "size": 4096, "time_us": 22},
        ]
    ],
    "external_annotations": [
        {"name": "Forward Pass", "stage": "START", "time_us": 10, "device": 0},
        {"name": "Forward Pass", "stage": "END", "time_us": 20, "device": 0},
    ],
}


def test_a_snapshot_becomes_allocations(tmp_path: Path, sweep_here: SweepHere) -> None:
    (tmp_path / "memory.pickle").write_bytes(pickle.dumps(SNAPSHOT))
    done = sweep_here("import", "memory.pickle", "--out", "run")
    assert done.exit_code == 0, done.stderr
    rows = load("run").allocations
    assert rows["total_bytes"].sum() == 5096  # the slack of that moment is unknown
    assert set(rows.loc[rows["moment"] == "peak", "phase"]) == {"forward"}
    assert "whole step" in set(rows["moment"])
    assert set(rows["call_chain"]) == {"me/train.py:7 step"}
    assert "Largest allocations at the peak" in done.stdout


def test_a_snapshot_without_a_record_has_what_was_alive(
    tmp_path: Path, sweep_here: SweepHere
) -> None:
    bare = {"segments": SNAPSHOT["segments"], "device_traces": [[]]}
    (tmp_path / "memory.pickle").write_bytes(pickle.dumps(bare))
    done = sweep_here("import", "memory.pickle", "--out", "run")
    assert "it has no record of allocations" in done.stderr
    rows = load("run").allocations
    assert dict(zip(rows["role"], rows["total_bytes"], strict=True)) == {
        "unlabelled": 1000,
        "slack": 24,
    }
    assert set(rows["moment"]) == {"end of the record"}


def test_the_import_command_prints_the_top_kernels(
    export: Path, sweep_here: SweepHere, tmp_path: Path
) -> None:
    done = sweep_here("import", export)
    assert done.exit_code == 0, done.stderr
    assert "Top kernels by phase" in done.stdout
    assert "ampere_sgemm_128x64_nn" in done.stdout
    assert (tmp_path / "results" / "report1" / "run.json").exists()
    refused = sweep_here("status", "results/report1")
    assert refused.exit_code == 2
    assert refused.stderr.startswith("sweep: results/report1: holds imported traces alone")
    assert sweep_here("report", "results/report1", "--table", "kernel-classes").exit_code == 0


def test_a_number_of_steps_that_no_column_holds_is_refused(
    export: Path, sweep_here: SweepHere
) -> None:
    assert sweep_here("import", export, "--out", "run", "--steps", 2**31 - 1).exit_code == 0
    assert sweep_here("import", export, "--out", "run", "--steps", 2**31).exit_code == 2


@pytest.mark.slow
def test_imported_and_measured_kernels_are_compared(
    tmp_path: Path, sweep_here: SweepHere, make_outcome: Callable[..., Outcome]
) -> None:
    """A trace without phases is compared as a whole."""
    with open_for_writing(Run(tmp_path / "measured")) as writer:
        writer.write_manifest({"name": "measured"})
        writer.append(make_outcome(), None)
    sweep_here("import", training_step().write(tmp_path / "trace.json"), "--out", "one")
    sweep_here("import", ten_steps(tmp_path / "ten.sqlite"), "--out", "two")
    sweep_here("import", ten_steps(tmp_path / "un.sqlite", ranges=False), "--out", "unknown")
    both = sweep_here("compare", "one", "two", "--table", "kernel-diff", "--format", "md")
    assert both.exit_code == 0, both.stderr
    (longest,) = [line for line in both.stdout.splitlines() if "3.000 |" in line]
    assert [text.strip() for text in longest.split("|")[1:-1]] == [
        "backward", "GEMM", "0", "0.000", "1", "3.000", "+3.000", SGEMM,
    ]  # fmt: skip
    assert "A: kineto trace.json, cell " in both.stdout
    mixed = sweep_here("compare", "measured", "two", "--table", "kernel-diff")
    assert "gemm_forward" in mixed.stdout
    assert SGEMM in mixed.stdout
    refused = sweep_here("compare", "one", "unknown", "--table", "kernel-diff")
    assert refused.exit_code == 2
    assert "the number of steps in its trace is not known. Import it again with --steps N" in (
        refused.stderr
    )
    kernels = ("--table", "kernel-diff", "--format", "md")
    whole = sweep_here("compare", "unknown", "unknown", *kernels)
    assert "A, whole trace ms" in whole.stdout
    verdict = sweep_here("compare", "one", "two")
    assert verdict.exit_code == 2
    assert "traces are compared with --table kernel-diff" in verdict.stderr
