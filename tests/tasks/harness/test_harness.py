from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tasks.__main__ import Rank, _final_status, _measure
from tasks.harness.device import VECTOR_MATH, Skip, open_device
from tasks.harness.error_kinds import (
    asked_bytes,
    is_device_oom,
    is_host_oom,
    is_thread_limit,
    is_unsupported,
)
from tasks.harness.stage import Session, Stage
from tasks.process.environment import fingerprint, probe
from tasks.process.journal import FinalStatus, Journal, JournalContents, read_journal
from tasks.process.phase_file import Progress, parse_wait, read_phase, waiting_page
from tasks.spec.attempt import Attempt, Settings, read_attempt
from tasks.spec.registry import all_tasks, make_cell
from tasks.spec.status import Status
from tasks.spec.tables import AllocationRow, KernelRow, LiveRow, Sample

MIB = 1024**2


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (RuntimeError("No available kernel. Aborting execution."), True),
        (
            RuntimeError(
                "cuDNN Frontend error: [cudnn_frontend] Error: No execution plans support the graph."
            ),
            True,
        ),
        (RuntimeError("CUDA out of memory"), False),
        (ValueError("No available kernel"), False),
    ],
)
def test_a_backend_that_has_no_kernel(error: BaseException, refused: bool) -> None:
    assert is_unsupported(error) is refused


@pytest.mark.parametrize(
    ("error", "device", "host", "asked"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has"),
            True,
            False,
            20 * MIB,
        ),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            True,
            False,
            None,
        ),
        (RuntimeError("CUDA error: out of memory"), True, False, None),
        (
            RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 512 bytes. Error code 12"
            ),
            False,
            True,
            512,
        ),
        (MemoryError(), False, True, None),
        (RuntimeError("std::bad_alloc"), False, True, None),
        (OSError(12, "Cannot allocate memory"), False, True, None),
        (RuntimeError("shapes do not match"), False, False, None),
        (ValueError("out of memory"), False, False, None),
        (FileNotFoundError("memory.txt"), False, False, None),
    ],
)
def test_errors_are_recognised_as_device_or_host_oom(
    error: BaseException, device: bool, host: bool, asked: int | None
) -> None:
    assert (is_device_oom(error), is_host_oom(error), asked_bytes(error)) == (device, host, asked)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Resource temporarily unavailable"),
        BlockingIOError(11, "Resource temporarily unavailable"),
        RuntimeError("can't start new thread"),
    ],
)
@pytest.mark.parametrize(
    ("params", "status"),
    [
        ({"memory_limit_gib": 1.0}, Status.OOM),
        ({"memory_limit_gib": None}, Status.FAILED),
        ({"memory_limit_gib": 1.0, "device": "cuda"}, Status.FAILED),
    ],
)
def test_a_thread_that_cannot_begin_is_the_doing_of_a_cap_on_the_host(
    error: BaseException, params: dict[str, Any], status: Status
) -> None:
    cell = make_cell("train_step", {"device": "cpu", "size": "tiny", **params})
    ending = _final_status(Attempt(cell, 1, "/nowhere", Settings()), error, {})
    assert ending.status is status
    assert ending.evidence["message"] == str(error)
    assert not is_thread_limit(ValueError("Resource temporarily unavailable"))


@pytest.mark.parametrize("kind", [Exception, RuntimeError, OSError, Skip])
def test_an_error_that_fails_to_say_what_it_is_has_its_row(kind: type[Exception]) -> None:
    class Speechless(kind):  # type: ignore[misc, valid-type]
        def __str__(self) -> str:
            raise ValueError

        __repr__ = __str__

    cell = make_cell("train_step", {"device": "cpu", "size": "tiny", "memory_limit_gib": 1.0})
    ending = _final_status(Attempt(cell, 1, "/nowhere", Settings()), Speechless(), {})
    said = "its message cannot be read: ValueError"
    assert ending.evidence["reason" if kind is Skip else "message"] == said
    assert ending.status is (Status.SKIPPED if kind is Skip else Status.FAILED)
    assert kind is Skip or "Speechless" in ending.evidence["traceback"]


def test_a_copy_of_the_process_writes_nothing(tmp_path: Path) -> None:
    """A model that forks and comes back has two of us: what both wrote would be there twice, and nobody could read the run."""
    path = tmp_path / "journal.jsonl"
    with path.open("a", encoding="utf-8") as stream:
        journal = Journal(stream)
        journal.stage("build")
        copy = os.fork()
        if copy == 0:
            journal.stage("of the copy")
            os._exit(0)
        _, status = os.waitpid(copy, 0)
        journal.end(FinalStatus(Status.OK))
    assert os.waitstatus_to_exitcode(status) == 1
    assert [json.loads(line).get("stage") for line in path.read_text().splitlines()] == [
        "build",
        None,
    ]


def test_a_journal_is_read_back_as_far_as_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with path.open("w") as stream:
        journal = Journal(stream)
        journal.stage("build")
        journal.facts({"a": 1})
        journal.facts({"b": "\ud800"})
        journal.rows(
            "samples",
            [
                Sample("timing", "duration", "ms", 1.5, "synced", "forward", 0),
                Sample("t", "m", "W", None, note="no"),
            ],
        )
        journal.end(FinalStatus(Status.OOM, {"asked_bytes": 3}))
    account = read_journal(path)
    assert (account.stage, account.facts, account.final) == (
        "build",
        {"a": 1, "b": "?"},
        FinalStatus(Status.OOM, {"asked_bytes": 3}),
    )
    assert [sample.value for sample in account.samples] == [1.5, None]
    whole = path.read_bytes()
    for place in range(len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        assert read_journal(path).final in (None, account.final)
        assert read_journal(path).final is None or read_journal(path).samples == account.samples
    path.write_bytes(whole[:-5] + b"\nnot json\n[1]\n")
    assert read_journal(path).final is None
    assert len(read_journal(path).samples) == 2
    assert read_journal(tmp_path / "nowhere").samples == ()


def test_rows_of_every_kind_come_through_the_journal(tmp_path: Path) -> None:
    kernel = KernelRow(
        "forward",
        "ffn",
        "GEMM",
        "scope",
        "aten::mm",
        "gemm",
        2,
        4,
        4000,
        1000.0,
        1000.0,
        900,
        1100,
        None,
    )
    allocation = AllocationRow(
        "peak", "forward", "activations", "ffn", "part", "forward", "a.py:1 f", 7, 2, 14
    )
    live = LiveRow(3, 0.25, "forward", "activations", 14)
    with (tmp_path / "journal.jsonl").open("w") as stream:
        journal = Journal(stream)
        journal.rows("kernels", [kernel])
        journal.rows("allocations", [allocation])
        journal.rows("live", [live])
    account = read_journal(tmp_path / "journal.jsonl")
    assert (account.kernels, account.allocations, account.live) == (
        (kernel,),
        (allocation,),
        (live,),
    )


def test_rows_and_evidence_that_a_failing_stage_adds_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that it leaves with its error, and what it adds to the evidence; other instruments are asked as well."""

    def run(session: Session) -> list[Sample]:
        def testify(error: Exception) -> None:
            session.evidence["snapshot"] = f"of {error}"
            session.live.append(LiveRow(3, 0.25, "forward", "activations", 14))

        session.on_error.append(testify)
        raise ValueError("this is the end")

    monkeypatch.setattr("tasks.instruments.stages_of", lambda names: [Stage("only", 1, run)])
    attempt = Attempt(
        make_cell("train_step", {"device": "cpu", "size": "tiny", "context_length": 16}),
        1,
        str(tmp_path),
        Settings(),
    )
    with (tmp_path / "journal.jsonl").open("w") as stream:
        _measure(Rank(attempt, 0, by_hand=True), stream, "spawn")
    account = read_journal(tmp_path / "journal.jsonl")
    assert account.final is not None
    assert account.final.status is Status.FAILED
    assert (account.final.evidence["message"], account.final.evidence["snapshot"]) == (
        "this is the end",
        "of this is the end",
    )
    assert [row.live_bytes for row in account.live] == [14]


def test_a_journal_may_go_anywhere() -> None:
    stream = io.StringIO()
    Journal(stream).stage("x")
    assert json.loads(stream.getvalue())["stage"] == "x"


def test_the_breadcrumb_outlives_its_writer(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "phase")
    progress.phase = "backward"
    assert read_phase(tmp_path / "phase") == progress.phase == "backward"
    progress.phase = "x" * 100
    assert read_phase(tmp_path / "phase") == "x" * 64
    progress.phase = ""
    assert read_phase(tmp_path / "phase") == ""
    assert read_phase(tmp_path / "nowhere") == ""


@pytest.mark.parametrize("limit_s", [1e-5, 0.5, 60.0, 1e7])
def test_a_page_of_a_process_that_waits_has_its_limit(limit_s: float) -> None:
    assert parse_wait(waiting_page("the end", limit_s)) == (limit_s, "the end")
    assert parse_wait("backward") is None


def test_attempts_travel_as_json() -> None:
    cell = make_cell("train_step", {"size": "tiny", "pass": "forward", "model_args": {}})
    attempt = Attempt(
        cell,
        3,
        "/somewhere",
        Settings(env={"A": "b"}, import_paths=("/x",), instruments=("timing",)),
    )
    assert read_attempt(attempt.to_json()) == attempt


def test_tasks_are_found_by_their_files() -> None:
    assert all_tasks()["train_step"].params.__name__ == "TrainStepParams"
    with pytest.raises(KeyError):
        make_cell("no_such_task", {})


def test_a_fingerprint_has_the_versions_and_the_device() -> None:
    found = probe()
    (cpu,) = found["fingerprints"]["cpu"]
    assert set(cpu) == {"python", "torch", "cpu", "cores"}
    gpu = fingerprint({**found, "gpu": "Test GPU"})
    assert set(gpu) == {"python", "torch", "cuda", "driver", "gpu"}


def test_the_cpu_is_opened_with_each_vector_function_called_once_by_one_thread() -> None:
    """One element is never shared out over threads."""
    seen: set[tuple[str, torch.dtype, int]] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if args and isinstance(args[0], torch.Tensor):
                seen.add((function.overloadpacket.__name__, args[0].dtype, args[0].numel()))
            return function(*args, **(kwargs or {}))

    with Watch():
        open_device("cpu")
    assert seen >= {
        (name, dtype, 1) for name in VECTOR_MATH for dtype in (torch.float32, torch.float64)
    }
    assert {"exp", "sqrt", "erf", "tanh", "sin", "cos", "log"} <= set(
        VECTOR_MATH
    )  # what Transformers are made of


@pytest.mark.parametrize(
    "line",
    ["{}", '{"time": "x"}', '{"time": 1, "status": "fine"}', '{"time": 1, "samples": [5]}'],
)
def test_a_journal_with_other_records_is_empty(line: str, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(f'{{"time": 1.0, "after_s": 0.0, "stage": "build"}}\n{line}\n')
    assert read_journal(path) == JournalContents()


def test_the_number_of_threads_that_conftest_chooses_is_set_before_torch_is_imported() -> None:
    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])
