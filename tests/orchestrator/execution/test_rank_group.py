"""Whose fault the end of several ranks is, and what their group measured."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from orchestrator.execution.exit_diagnosis import ProcessExit, build_outcome
from orchestrator.execution.rank_group import (
    blame,
    find_cause,
    group_samples,
    rank_rows,
    skew_facts,
)
from tasks.__main__ import measure_forked
from tasks.harness.setup import set_up
from tasks.harness.workload import Workload
from tasks.process.journal import FinalStatus, JournalContents
from tasks.process.minder import AttemptLimits, MindRequest, RankExits, mind
from tasks.spec.attempt import (
    ATTEMPT_FILE,
    FLIGHT_FILE,
    JOURNAL_FILE,
    LOG_FILE,
    Attempt,
    Settings,
    rank_file,
)
from tasks.spec.axes import axis
from tasks.spec.outcome import Outcome
from tasks.spec.parameters import RankedParams, TimedParams
from tasks.spec.registry import Task, all_tasks, make_cell
from tasks.spec.status import Status
from tasks.spec.tables import Sample

TIMEOUT_S = 2.0  # of a collective; nothing here waits for one in vain unless it must
NCCL_REPORT = (
    "[rank0]:[E1127 ProcessGroupNCCL.cpp:690] [Rank 0] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=5000) ran "
    "for 5012 milliseconds before timing out."
)
SOON_S = 20.0  # how long a group may take to end, on a busy machine


class FaultyParams(RankedParams, TimedParams):
    """Ranks that reduce numbers, of which one does something else in its third measured step."""

    how: str = axis("well", "what it does")
    how_checked: str = axis("well", "what it does after the timing, while the others wait for it")
    culprit: int = axis(1, "rank that does it")


LONG_S = 600.0  # longer than the limit of a collective


def build(params: FaultyParams) -> Workload:
    device, numbers, done = set_up(params), torch.ones(8, device=params.device), list[int]()

    def step(phase: Any) -> None:
        with phase("forward"):
            done.append(1)
            if len(done) == 5 and dist.get_rank() == params.culprit:
                ACTS[params.how]()
            elif len(done) == 5 and params.how == "sleep_beside_nccl":
                os.write(2, NCCL_REPORT.encode())
            dist.all_reduce(numbers)
            numbers.fill_(1.0)

    def verify() -> None:
        if dist.get_rank() == params.culprit:
            ACTS[params.how_checked]()

    return Workload(step, ("forward",), device, None, verify=verify)


def kill_itself(number: int) -> None:
    faulthandler.disable()  # that of pytest
    os.kill(os.getpid(), number)


def fail() -> None:
    raise ValueError("wrong on purpose")


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.50 GiB.")


def fork_a_daemon() -> None:
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
    fail()


def differ() -> None:
    raise RuntimeError("the ranks have different parameters")


def take_memory() -> None:
    numbers = torch.ones(2_000_000_000, dtype=torch.uint8)
    time.sleep(600)
    numbers.fill_(2)


ACTS: dict[str, Callable[[], object]] = {
    "differ": differ,
    "take_memory": take_memory,
    "well": lambda: None,
    "fail": fail,
    "fork_a_daemon": fork_a_daemon,
    "run_out_of_memory": run_out_of_memory,
    "kill": lambda: kill_itself(signal.SIGKILL),
    "crash": lambda: kill_itself(signal.SIGSEGV),
    "stop": lambda: kill_itself(signal.SIGSTOP),
    "leave": lambda: os._exit(7),
    "leave_well": lambda: os._exit(0),
    "sleep": lambda: time.sleep(600),
    "sleep_beside_nccl": lambda: time.sleep(600),
    "call_another": lambda: dist.broadcast(torch.ones(8), 0),
}


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Task("faulty", 1, FaultyParams, build, lambda params: 1.0)
    monkeypatch.setitem(all_tasks(), "faulty", made)  # type: ignore[index]


Run = Callable[..., Outcome]


@pytest.fixture
def run(task: None, tmp_path: Path) -> Iterator[Run]:
    """Measure a cell whose ranks are forked by a minder of this process. None is left afterwards."""
    started: list[psutil.Process] = []

    def run_one(
        how: str = "well",
        ranks: int = 2,
        limit_s: float = TIMEOUT_S,
        memory_gib: float | None = None,
        **values: Any,
    ) -> Outcome:
        values = {"warmup_steps": 2, "measured_steps": 6, "how": how, **values}
        cell = make_cell("faulty", {"device": "cpu", "processes": ranks, **values})
        settings = Settings(
            collective_timeout_s=limit_s,
            instruments=("timing", "memory"),
            host_memory_gib=memory_gib,
        )
        attempt = Attempt(cell, 1, str(tmp_path), settings)
        (tmp_path / ATTEMPT_FILE).write_text(attempt.to_json())
        request = MindRequest(
            name=cell.id,
            attempt=str(tmp_path / ATTEMPT_FILE),
            journal=str(tmp_path / JOURNAL_FILE),
            log=str(tmp_path / LOG_FILE),
            folder=str(tmp_path),
            variables={},
            ranks=ranks,
            host_memory_gib=memory_gib,
        )
        began = time.monotonic()
        client, theirs = socket.socketpair()
        minder = os.fork()
        if minder == 0:
            client.close()
            files = (request.attempt, request.journal)
            mind(request, lambda rank: measure_forked(*files, rank), theirs)
        theirs.close()
        with client, client.makefile() as lines:
            pids = json.loads(lines.readline())["ranks"]
            for pid in pids:
                with suppress(psutil.NoSuchProcess):
                    started.append(psutil.Process(pid))
            exits = RankExits(**json.loads(lines.readline()))
        os.waitpid(minder, 0)
        wall_s = time.monotonic() - began
        return build_outcome(attempt, ProcessExit(exits, wall_s), 0.0)

    yield run_one
    assert started
    assert not any(process.is_running() for process in started)


@pytest.mark.process
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_that_are_well_measure_the_steps_of_the_slowest(run: Run, ranks: int) -> None:
    outcome = run(ranks=ranks)
    assert (outcome.status, outcome.evidence) == (Status.OK, {})
    assert outcome.facts["ranks"] == ranks
    assert [row.rank for row in outcome.ranks] == list(range(ranks))
    assert {row.status for row in outcome.ranks} == {"ok"}
    assert sum(row.slowest for row in outcome.ranks) == 6
    often = [row.slowest for row in outcome.ranks]
    assert often[outcome.facts["slowest_rank"]] == max(often)
    assert outcome.facts["slowest_rank_share"] == pytest.approx(max(often) / 6)
    assert 0 <= outcome.facts["step_skew_ms"] <= max(row.step_ms or 0 for row in outcome.ranks)
    synced = [
        s.value
        for s in outcome.samples
        if (s.mode, s.phase, s.metric) == ("synced", "step", "duration")
    ]
    assert len(synced) == 6
    assert sorted(synced)[3] >= max(row.step_ms or 0 for row in outcome.ranks) * 0.99


@pytest.mark.process
def test_ranks_agree_on_the_number_of_steps(run: Run) -> None:
    adaptive = {"timing": "adaptive", "most_steps": 8, "half_width": 1e-6, "most_seconds": 60.0}
    outcome = run(ranks=2, warmup_steps=None, measured_steps=None, **adaptive)
    assert (outcome.status, outcome.evidence) == (Status.OK, {})


FAULTS: dict[str, tuple[Status, dict[str, Any]]] = {
    "fail": (Status.FAILED, {"message": "wrong on purpose"}),
    "fork_a_daemon": (Status.FAILED, {"message": "wrong on purpose"}),
    "run_out_of_memory": (Status.OOM, {"asked_bytes": int(20.5 * 1024**3)}),
    "kill": (Status.CRASHED, {"signal": "SIGKILL"}),
    "crash": (Status.CRASHED, {"signal": "SIGSEGV"}),
    "leave": (Status.CRASHED, {"exit_code": 7}),
    "leave_well": (Status.CRASHED, {"exit_code": 0}),
    "stop": (Status.TIMEOUT, {"message": "rank {rank} did not arrive at all_reduce 6 within 2 s"}),
    "sleep": (Status.TIMEOUT, {"message": "rank {rank} did not arrive at all_reduce 6 within 2 s"}),
}


@pytest.mark.process
@pytest.mark.parametrize(
    ("how", "ranks", "culprit"),
    [
        *((how, 2, culprit) for how in FAULTS for culprit in (0, 1)),
        *((how, *which) for how in ("fail", "kill", "stop", "sleep") for which in ((4, 2), (8, 5))),
    ],
)
def test_a_row_names_the_rank_that_ended_the_group(
    run: Run, how: str, ranks: int, culprit: int
) -> None:
    outcome = run(how, ranks=ranks, culprit=culprit)
    status, evidence = FAULTS[how]
    wanted = {name: str(value).format(rank=culprit) for name, value in evidence.items()}
    found = {name: str(outcome.evidence.get(name)) for name in evidence}
    assert (outcome.status, outcome.evidence["rank"], found) == (status, culprit, wanted)
    assert (outcome.stage, outcome.phase) == ("timing synced", "forward")
    assert outcome.wall_s < SOON_S
    steps = {s.step for s in outcome.samples if (s.mode, s.phase) == ("warmup", "step")}
    assert steps == {0, 1}  # what all ranks measured before


@pytest.mark.process
def test_a_report_of_nccls_watchdog_ends_the_group(run: Run) -> None:
    """NCCL itself ends the process a minute later, or never."""
    outcome = run("sleep_beside_nccl", limit_s=600.0)
    message = "rank 1 did not arrive at all_reduce 6 within 600 s"
    assert (outcome.status, outcome.evidence["message"]) == (Status.TIMEOUT, message)
    assert (outcome.evidence["rank"], outcome.evidence.get("signal")) == (1, None)
    assert outcome.wall_s < SOON_S


@pytest.mark.process
@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("how", ["stop", "sleep"])
def test_a_rank_for_which_others_wait_outside_of_a_collective_is_named(
    run: Run, how: str, culprit: int
) -> None:
    outcome = run(how_checked=how, culprit=culprit)
    assert (outcome.status, outcome.evidence["rank"]) == (Status.TIMEOUT, culprit)
    place = outcome.evidence["collective"]
    assert outcome.evidence["message"] == f"rank {culprit} did not arrive at {place} within 2 s"
    assert outcome.stage == "ranks compared"
    assert outcome.wall_s < SOON_S


@pytest.mark.process
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_result_that_is_wrong_on_a_rank_is_a_failure(run: Run, culprit: int) -> None:
    outcome = run(how_checked="differ", culprit=culprit)
    assert (outcome.status, outcome.evidence["rank"]) == (Status.FAILED, culprit)
    assert outcome.evidence["message"] == "the ranks have different parameters"


@pytest.mark.process
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_needs_more_host_memory_than_allowed_is_named(run: Run, culprit: int) -> None:
    # Each rank begins as a copy of this process, which other tests have made larger. Pages of files
    # are no part of a copy until they are read.
    memory = psutil.Process().memory_info()
    allowed_gib = (memory.rss - memory.shared) / 1024**3 + 1.0
    # Filling memory takes seconds on a busy machine.
    outcome = run("take_memory", limit_s=SOON_S, culprit=culprit, memory_gib=allowed_gib)
    assert (outcome.status, outcome.evidence["rank"]) == (Status.HOST_OOM, culprit)
    assert int(str(outcome.evidence["rss_bytes"])) > allowed_gib * 1024**3


@pytest.mark.process
def test_after_two_failures_in_a_row_a_group_is_well(run: Run, tmp_path: Path) -> None:
    for how, status in (("kill", Status.CRASHED), ("stop", Status.TIMEOUT), ("well", Status.OK)):
        for file in tmp_path.iterdir():
            file.unlink()
        assert run(how).status is status


@pytest.mark.process
def test_ranks_that_call_different_collectives_are_told_apart(run: Run) -> None:
    outcome = run("call_another")
    assert outcome.status is Status.FAILED
    message = str(outcome.evidence["message"])
    assert message.startswith("ranks called different collectives as number 6: ")
    assert "rank 0 all_reduce" in message
    assert "rank 1 broadcast" in message


def journal(final: FinalStatus | None, wall_s: float = 1.0, samples: Any = ()) -> JournalContents:
    return JournalContents(1.0, wall_s, "build", samples=tuple(samples), final=final)


def failed(message: str) -> FinalStatus:
    return FinalStatus(Status.FAILED, {"message": message})


WELL = FinalStatus(Status.OK)
GONE = "Connection closed by peer [127.0.0.1]:39131"


@pytest.mark.parametrize(
    ("finals", "exits", "cause"),
    [
        ([WELL, WELL], RankExits([0, 0]), 0),
        ([WELL, None], RankExits([0, 0]), 1),  # it was killed with its driver
        ([failed(GONE), None], RankExits([1, -9], [0, 1]), 1),  # a killed rank writes nothing
        ([failed(GONE), None], RankExits([1, 0], [0]), 1),  # nor does one that just leaves
        ([failed("wrong"), None], RankExits([1, -9], [0]), 0),  # the minder killed the other one
        ([failed(GONE), failed("wrong")], RankExits([1, 1], [0, 1]), 1),
        ([failed("wrong"), failed(GONE)], RankExits([1, 1], [1, 0]), 0),
        ([failed("wrong"), failed("wrong, too")], RankExits([1, 1], [1, 0]), 0),  # by the journals
    ],
)
def test_an_echo_of_an_end_is_not_its_cause(
    finals: list[FinalStatus | None], exits: RankExits, cause: int
) -> None:
    journals = [journal(final, wall_s=1.0 + rank) for rank, final in enumerate(finals)]
    assert find_cause(journals, exits) == cause


def flight(
    attempt: Attempt, rank: int, number: int, name: str = "all_reduce", size: int = 8
) -> None:
    entry = {"collective_seq_id": number, "profiling_name": f"nccl:{name}", "input_sizes": [[size]]}
    content = {"entries": [{"collective_seq_id": 1}, {**entry, "input_dtypes": ["Float"]}]}
    rank_file(attempt.path / FLIGHT_FILE, rank).write_text(json.dumps(content))


@pytest.fixture
def attempt(task: None, tmp_path: Path) -> Attempt:
    cell = make_cell("faulty", {"device": "cpu", "processes": 3})
    return Attempt(cell, 1, str(tmp_path), Settings(collective_timeout_s=5.0))


LATE = failed("Timed out waiting 5000ms for recv operation to complete")


def test_the_ranks_that_did_not_arrive_are_at_fault(attempt: Attempt) -> None:
    flight(attempt, 0, 7)
    flight(attempt, 1, 6)
    rank, final = blame(attempt, 0, LATE, LONG_S)
    assert (rank, final.status) == (1, Status.TIMEOUT)
    assert final.evidence == {
        "rank": 1,
        "collective": "all_reduce 7",
        "arrived": {"0": "all_reduce 7", "1": "all_reduce 6"},
        "message": "rank 1, 2 did not arrive at all_reduce 7 within 5 s",
    }


def test_a_collective_at_which_all_arrived_is_the_links_fault(attempt: Attempt) -> None:
    for rank in range(3):
        flight(attempt, rank, 7)
    _, final = blame(attempt, 0, LATE, LONG_S)
    assert final.status is Status.TIMEOUT
    assert "all ranks arrived at all_reduce 7" in str(final.evidence["message"])


def test_a_watchdog_that_aborts_its_rank_reports_a_late_one(attempt: Attempt) -> None:
    """NCCL's ends the process by a signal, so that it writes no flight record."""
    for rank, number in ((1, 7), (2, 6)):
        flight(attempt, rank, number)
    (attempt.path / LOG_FILE).write_text(NCCL_REPORT)
    killed = FinalStatus(Status.CRASHED, {"message": "killed by SIGABRT", "signal": "SIGABRT"})
    rank, final = blame(attempt, 0, killed, LONG_S)
    assert (rank, final.status) == (2, Status.TIMEOUT)
    assert final.evidence["arrived"] == {
        "0": "allreduce 7",
        "1": "all_reduce 7",
        "2": "all_reduce 6",
    }


@pytest.mark.parametrize(("numbers", "rank"), [((7, 7, 6), 2), ((7, 7, 7), None)])
def test_the_limit_of_an_attempt_names_a_rank_only_if_one_is_behind(
    attempt: Attempt, numbers: Sequence[int], rank: int | None
) -> None:
    for one, number in enumerate(numbers):
        flight(attempt, one, number)
    evidence = {"message": "not done after 5 s", "timeout_s": 5.0}
    found, final = blame(attempt, 0, FinalStatus(Status.TIMEOUT, evidence), LONG_S)
    assert (final.status, final.evidence.get("rank")) == (Status.TIMEOUT, rank)
    assert found == (rank or 0)
    assert final.evidence["message"] == "not done after 5 s"


def test_words_of_a_model_are_no_report_of_nccls_watchdog(
    tmp_path: Path,
) -> None:
    log = tmp_path / LOG_FILE
    request = MindRequest("c", "", str(tmp_path / JOURNAL_FILE), str(log), "", {}, ranks=2)
    limits = AttemptLimits(request)
    log.write_text("Watchdog caught collective operation timeout")
    assert limits.ranks_in_vain() == []
    log.write_text(NCCL_REPORT)
    assert limits.ranks_in_vain() == [0]
    log.unlink()
    log.mkdir()
    assert limits.ranks_in_vain() == []


def test_a_closed_connection_while_all_ranks_run_is_that_of_a_rank_that_waited(
    attempt: Attempt,
) -> None:
    """It closes its connections before it ends, so that its peer may end first."""
    for rank, number in ((0, 7), (1, 7), (2, 6)):
        flight(attempt, rank, number)
    rank, final = blame(attempt, 0, failed(GONE), LONG_S)
    assert (rank, final.status) == (2, Status.TIMEOUT)
    # Nobody can have waited for the whole limit: the model has closed them.
    rank, final = blame(attempt, 0, failed(GONE), attempt.settings.collective_timeout_s / 2)
    assert (rank, final.status) == (2, Status.FAILED)
    assert final.evidence["message"] == "rank 2 closed its connections before all_reduce 7"


def test_sizes_that_differ_are_a_failure(attempt: Attempt) -> None:
    for rank in range(3):
        flight(attempt, rank, 7, size=8 + rank // 2)
    _, final = blame(attempt, 0, LATE, LONG_S)
    assert final.status is Status.FAILED
    assert "rank 2 all_reduce of [[9]]" in str(final.evidence["message"])


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"entries": []}', '{"entries": [{}]}', '{"entries": 3}']
)
def test_a_flight_record_that_cannot_be_read_is_none(attempt: Attempt, content: str) -> None:
    (attempt.path / FLIGHT_FILE).write_text(content)
    assert blame(attempt, 0, LATE, LONG_S)[1].status is Status.FAILED


def step(number: int, ms: float | None, mode: str = "synced") -> Sample:
    return Sample("timing", "duration", "ms", ms, mode, "step", number)


def test_the_group_has_the_largest_duration_of_each_step_and_the_sum_of_the_power() -> None:
    peak = {"mode": "steady", "phase": "backward"}
    first = [
        step(0, 5.0),
        step(1, 1.0),
        Sample("memory", "peak_allocated_bytes", "bytes", 10, **peak),
    ]
    first += [
        Sample("telemetry", "timed_power", "W", 300.0, "timing"),
        Sample("timing", "lead", "ms", 1.0),
    ]
    second = [
        step(0, 3.0),
        step(1, 4.0),
        Sample("memory", "peak_allocated_bytes", "bytes", 30, **peak),
    ]
    second += [
        Sample("telemetry", "timed_power", "W", 350.0, "timing"),
        Sample("timing", "lead", "ms", 2.0),
    ]
    joined = [sample.value for sample in group_samples([first, second])]
    assert joined == [5.0, 4.0, 30, 650.0, 2.0]  # the lead is that of the slower rank
    assert group_samples([first]) == tuple(first)


def test_a_step_that_a_rank_did_not_finish_is_not_the_groups() -> None:
    assert group_samples([[step(0, 1.0), step(1, 1.0)], [step(0, 9.0)]]) == (step(0, 9.0),)


def test_a_value_that_a_rank_lacks_is_not_made_up() -> None:
    first, second = [step(0, 1.0)], [step(0, None)]
    assert [one.value for one in group_samples([first, second])] == [1.0]


def test_each_rank_has_a_row() -> None:
    fast = [step(0, 1.0), step(1, 6.0), Sample("memory", "peak_allocated_bytes", "bytes", 5)]
    slow = [step(0, 2.0), step(1, 4.0), Sample("memory", "peak_allocated_bytes", "bytes", 7)]
    slow.append(Sample("overlap", "wait", "ms", 0.5))
    rows = rank_rows([journal(WELL, samples=fast), journal(None, samples=slow)])
    assert [
        (row.step_ms, row.slowest, row.status, row.peak_allocated_bytes, row.wait_ms)
        for row in rows
    ] == [(3.5, 1, "ok", 5, None), (3.0, 1, "", 7, 0.5)]


def test_the_skew_is_between_the_slowest_and_the_fastest_rank_of_each_step() -> None:
    durations = [(1.0, 6.0, 3.0, 9.0), (2.0, 4.0, 4.0), (2.5, 4.0, 5.0)]
    ranks = [journal(WELL, samples=[step(n, ms) for n, ms in enumerate(own)]) for own in durations]
    assert skew_facts(ranks) == {
        "step_skew_ms": 2.0,
        "slowest_rank": 2,
        "slowest_rank_share": pytest.approx(2 / 3),
    }
    # A rank without steps: nothing is known of the others.
    assert skew_facts([*ranks, journal(None)]) == {}
