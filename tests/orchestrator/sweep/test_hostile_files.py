"""Traces and snapshots that somebody made to take all memory or all time end in one line."""

from __future__ import annotations

import gzip
import json
import pickle
import resource
import sqlite3
import struct
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from orchestrator.common.errors import RunError
from orchestrator.store.run import Run
from orchestrator.sweep import trace_import
from orchestrator.sweep.trace_import import import_file
from tasks.snapshots import replay, summary
from tasks.traces import chrome, nsys, timeline
from tasks.traces.kernel_classes import classify
from tests.support.traces import NsysExport

MB = 1024**2
Write = Callable[[Path], object]
_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_COLUMNS = '"end" integer, deviceId integer, globalPid integer, correlationId integer'
_ROWS_WITHOUT_END = f"""CREATE VIEW {_KERNELS} AS WITH RECURSIVE c(x) AS
    (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x AS start, x + 1 AS "end", 0 AS deviceId,
    1 AS globalPid, x AS correlationId, 1 AS demangledName FROM c"""


def refusal(write: Write, file: Path) -> str:
    """Return why a file is not imported."""
    write(file)
    began = time.process_time()
    with pytest.raises(RunError) as refused:
        import_file(file, Run(file.parent / "run"))
    assert time.process_time() - began < 5
    assert not (file.parent / "run").exists()
    return str(refused.value)


def database(*statements: str) -> Write:
    def write(file: Path) -> None:
        with closing(sqlite3.connect(file)) as opened, opened:
            opened.execute("CREATE TABLE StringIds (id integer, value text)")
            opened.execute("INSERT INTO StringIds VALUES (1, 'k')")
            for statement in statements:
                opened.execute(statement)

    return write


def content(text: bytes) -> Write:
    return lambda file: file.write_bytes(text)


def snapshot(**values: object) -> Write:
    whole = {"segments": [], "device_traces": [], **values}
    return content(pickle.dumps(whole, protocol=4))


def pair_of_pairs(depth: int) -> object:
    """Return a tuple that takes 50 bytes for each level, and whose hash takes 2^depth steps."""
    nested: object = ("a", "b")
    for _ in range(depth):
        nested = (nested, nested)
    return nested


def test_a_view_without_end_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "view.sqlite"
    assert "contains no CUDA kernels" in refusal(database(_ROWS_WITHOUT_END), file)


def test_a_view_that_passes_for_a_table_is_not_read(tmp_path: Path) -> None:
    write = database(
        _ROWS_WITHOUT_END,
        "PRAGMA writable_schema = ON",
        "UPDATE sqlite_master SET type = 'table', rootpage = 2 WHERE type = 'view'",
    )
    assert "not an export of Nsight Systems" in refusal(write, tmp_path / "view.sqlite")


def test_a_column_that_is_computed_is_not_read(tmp_path: Path) -> None:
    start = "start integer GENERATED ALWAYS AS (length(hex(zeroblob(100000000 + id * 0))))"
    write = database(
        f"CREATE TABLE {_KERNELS} (id integer, {_COLUMNS}, demangledName integer, {start})",
        f'INSERT INTO {_KERNELS}(id, "end", deviceId) VALUES (1, 9999999999, 0)',
    )
    assert "has a column that is computed" in refusal(write, tmp_path / "column.sqlite")


def test_rows_without_end_are_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of a damaged file can be in a tree many times, and each name is looked up."""
    monkeypatch.setattr(nsys, "_INSTRUCTIONS", 1000)
    monkeypatch.setattr(nsys, "_CHECKED_AFTER", 100)
    monkeypatch.setattr(nsys, "_INSTRUCTIONS_PER_BYTE", 0)
    export = NsysExport(tmp_path / "many.sqlite")
    for number in range(60):
        export.kernel("k", None, number, number + 1)
    assert "interrupted" in refusal(lambda file: None, export.path)


def test_a_compressed_text_that_expands_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chrome, "_ALWAYS_EXPANDED", MB)
    text = b'{"traceEvents": [' + b" " * (40 * MB) + b"]}"
    write = content(gzip.compress(text))
    assert "it expands to more than 4," in refusal(write, tmp_path / "bomb.json.gz")


@pytest.mark.parametrize("opening", ['{"args":', "["])
def test_a_deeply_nested_trace_is_refused(opening: str, tmp_path: Path) -> None:
    closing_letter = "}" if opening.startswith("{") else "]"
    value = opening * 200_000 + "1" + closing_letter * 200_000
    write = content(f'{{"x": {value}, "traceEvents": [{value}]}}'.encode())
    assert "not a trace of torch.profiler" in refusal(write, tmp_path / "nested.json")


def test_spans_in_each_other_without_end_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kernel would look at each span."""
    monkeypatch.setattr(timeline, "_DEEPEST", 50)
    events = [{"cat": "cpu_op", "name": "o", "ts": n, "dur": 200 - 2 * n} for n in range(60)]
    write = content(json.dumps({"traceEvents": events}).encode())
    assert "lie in each other" in refusal(write, tmp_path / "deep.json")


def test_a_trace_with_a_million_devices_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_import, "_MOST_RANKS", 10)
    kernel = {"cat": "kernel", "name": "k", "ts": 1, "dur": 1}
    events = [{**kernel, "args": {"device": n}} for n in range(11)]
    write = content(json.dumps({"traceEvents": events}).encode())
    assert "has 11 processes and GPUs, more than 10" in refusal(write, tmp_path / "many.json")
    segments = [{"device": n, "blocks": []} for n in range(11)]
    message = refusal(snapshot(segments=segments), tmp_path / "many.pickle")
    assert "has 11 processes and GPUs, more than 10" in message


@pytest.mark.parametrize(
    "name",
    [
        "triton_poi_fused_" + "copy__unsafe_view_" * 200 + "x",
        "triton_red_fused_" + "max" * 100_000,
        "float8" * 100_000,
    ],
    ids=lambda name: name[:20],
)
def test_a_name_of_a_kernel_is_classified_in_time(name: str) -> None:
    began = time.process_time()
    classify(name)
    assert time.process_time() - began < 2


def test_a_range_is_parsed_in_time() -> None:
    began = time.process_time()
    nsys._span(", sizes = " * 20_000 + "\n", 1, 2)
    nsys._span(", seq = 1" * 20_000 + "\n", 1, 2)
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("write", "message"),
    [
        # A memo with 2^31 entries takes 16 GiB, and needs 5 bytes.
        (content(b"\x80\x04K\x01r" + struct.pack("<I", 2**31) + b"."), "too much memory"),
        (content(b"\x80\x05\x8e" + struct.pack("<Q", 2**40) + b"."), "too much memory"),
        (content(b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"."), "too much memory"),
        (content(b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b"."), "it has no segments"),
        (snapshot(segments=[pair_of_pairs(60)]), "of the type tuple"),
        (snapshot(segments=[{"device": pair_of_pairs(60), "blocks": []}]), "device in it is of"),
        (snapshot(device_traces=[[{"action": "alloc", "addr": pair_of_pairs(60)}]]), "addr in it"),
        (snapshot(device_traces=[[{"user_metadata": "x" * 20_000}]]), "more than 10,000 char"),
        (snapshot(device_traces=[[{"frames": [{}] * 2000}]]), "at most 1000 frames"),
        (snapshot(device_traces=[[{"frames": [{"name": pair_of_pairs(60)}]}]]), "name in it is"),
        (snapshot(external_annotations=[{"name": pair_of_pairs(60)}]), "name in it is of the"),
    ],
)
def test_a_pickle_that_grows_is_refused(write: Write, message: str, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    assert message in refusal(write, tmp_path / "grows.pickle")
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_a_pickle_that_is_hashed_for_ever_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_import, "_PICKLE_S", 1)
    doubled = b"".join(b"\x940h%ch%c\x86" % (n, n) for n in range(60))
    write = content(b"\x80\x04})" + doubled + b"Ns.")
    message = refusal(write, tmp_path / "hashed.pickle")
    assert "not a memory snapshot: reading it crashes, or takes more than 1 s" in message


def test_a_file_whose_name_is_no_utf8_is_imported(tmp_path: Path) -> None:
    export = NsysExport(tmp_path / "n\udcff.sqlite")
    export.kernel("k", None, 1, 2)
    run = Run(tmp_path / "run")
    import_file(export.path, run)
    (params,) = run.read("attempts")["params"]
    assert json.loads(params)["file"] == r"n\udcff.sqlite"


def annotated(count: int) -> dict[str, Any]:
    annotations: list[dict[str, Any]] = []
    for stage, time_us in (("START", -1), ("END", 0)):
        annotations.append({"name": "forward", "stage": stage, "time_us": time_us})
    for number in range(count):
        for stage, after in (("START", 0), ("END", 1)):
            time_us = 2 * number + after
            annotations.append({"name": "backward", "stage": stage, "time_us": time_us})
    events = [{"action": "alloc", "addr": n, "size": 1, "time_us": n} for n in range(3 * count)]
    return {"segments": [], "device_traces": [events], "external_annotations": annotations}


def test_a_snapshot_with_many_phases_in_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (123, 124, 125, 300):  # up to 250 points are drawn, of which each phase takes two
        record = replay.replay(annotated(count))  # type: ignore[arg-type]
        assert list(summary._spans(record))
    monkeypatch.setattr(replay, "_MOST_PHASES", 100)
    with pytest.raises(ValueError, match="more than 100 phases"):
        replay.replay(annotated(300))  # type: ignore[arg-type]
