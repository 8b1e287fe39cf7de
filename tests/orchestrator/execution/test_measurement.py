"""What a cell leaves when it dies, of its rows and of its processes. Each way to die is a row of test_faults.py."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.common.errors import PlatformError
from orchestrator.execution import measurement
from orchestrator.execution.exit_diagnosis import ProcessExit, build_outcome, lost_outcome
from orchestrator.execution.fork_client import ForkServerLost
from orchestrator.execution.host_probe import probe_here
from orchestrator.execution.measurement import FORK_SERVERS, Slot, execute, measure, recover
from tasks.process.journal import Journal, read_journal
from tasks.process.minder import RankExits
from tasks.spec.attempt import ATTEMPT_FILE, JOURNAL_FILE, LOG_FILE, RERUN_FILE, Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.source_digest import source_digest
from tasks.spec.status import Status
from tests.conftest import ROOT, has_ended

TESTS = str(ROOT / "tests" / "support")
MakeAttempt = Callable[..., Attempt]
CGROUPS = ("/sys/fs/cgroup/memory", "/sys/fs/cgroup")
EXECUTE = (
    "import sys; from pathlib import Path; from orchestrator.execution.measurement import execute;"
    "from tasks.spec.attempt import read_attempt; execute(read_attempt(Path(sys.argv[1]).read_text()))"
)


@pytest.fixture
def misbehave(make_attempt: MakeAttempt) -> Callable[..., Outcome]:
    def run(how: str, settings: dict[str, Any] | None = None, **params: Any) -> Outcome:
        args = {"how": how, **params.pop("model_args", {})}
        own = {"size": None, "model": "misbehaving:Model", "model_args": args, **params}
        return execute(make_attempt(settings={"import_paths": (TESTS,), **(settings or {})}, **own))

    return run


@pytest.mark.process
@pytest.mark.parametrize(("beaten_ms", "is_beaten"), [(1e-6, True), (1e6, False)])
def test_the_limit_of_a_cell_reaches_its_process(
    make_attempt: MakeAttempt, beaten_ms: float, is_beaten: bool
) -> None:
    attempt = make_attempt(
        settings={"beaten_ms": beaten_ms},
        timing="adaptive",
        warmup_steps=None,
        measured_steps=None,
    )
    outcome = execute(attempt)
    assert outcome.status is Status.OK
    assert (outcome.facts["timing_stopped_by"] == "beaten") is is_beaten
    assert (
        outcome.attempt.cell.id
        == make_attempt(timing="adaptive", warmup_steps=None, measured_steps=None).cell.id
    )


@pytest.mark.process
def test_a_good_cell_is_measured(make_attempt: MakeAttempt) -> None:
    outcome = execute(make_attempt())
    assert (outcome.status, outcome.stage, outcome.phase) == (Status.OK, "", "")
    taken = {
        (sample.mode, sample.phase) for sample in outcome.samples if sample.instrument == "timing"
    }
    assert taken == {
        (m, p) for m in ("warmup", "synced") for p in ("forward", "backward", "optimizer", "step")
    }
    assert {s.mode for s in outcome.samples if s.metric == "peak_rss_bytes"} == {"first", "steady"}
    assert all(
        sample.value > 0
        for sample in outcome.samples
        if sample.value is not None and sample.metric != "waited_for_core"
    )
    assert outcome.facts["parameters"] == outcome.facts["parameters_expected"]
    assert outcome.facts["float32_matmul_precision"] == "highest"
    assert outcome.facts["fingerprint"]["torch"]
    seconds = outcome.facts["stage_s"]
    assert sum(seconds.values()) == pytest.approx(outcome.wall_s)
    assert list(seconds)[:2] == ["start", "build"]
    steps_s = (
        sum(s.value or 0.0 for s in outcome.samples if (s.mode, s.phase) == ("synced", "step"))
        / 1e3
    )
    assert steps_s <= seconds["timing synced"] < outcome.wall_s
    assert seconds["process"] > 0


@pytest.mark.process
@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_an_oom_of_a_measured_step_keeps_what_was_warm_up(
    misbehave: Callable[..., Outcome], where: str
) -> None:
    outcome = misbehave("cuda_oom", model_args={"where": where, "step": 1})
    assert outcome.status is Status.OOM
    assert (outcome.stage, outcome.phase) == ("timing synced", where)
    assert outcome.evidence["asked_bytes"] == int(20.5 * 1024**3)
    assert len([s for s in outcome.samples if (s.phase, s.mode) == ("step", "warmup")]) == 1


@pytest.mark.process
def test_a_clock_that_jumps_changes_no_duration(
    misbehave: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Back by a year in the child, and on by one for its supervisor at each look."""
    now, looks = time.time, itertools.count()
    monkeypatch.setattr(time, "time", lambda: now() + 365 * 86400 * next(looks))
    outcome = misbehave("jump_the_clock", settings={"timeout_s": 50.0})
    assert outcome.status is Status.OK
    recovered = recover(outcome.attempt)
    assert recovered is not None
    for wall in (outcome.wall_s, recovered.wall_s):
        assert 0 < wall < 50
    assert all(
        0 < s.value < 50_000
        for s in outcome.samples
        if s.metric == "duration" and s.value is not None
    )


@pytest.mark.process
def test_steps_measured_before_a_failure_are_kept(misbehave: Callable[..., Outcome]) -> None:
    outcome = misbehave("fail", warmup_steps=2, measured_steps=4, model_args={"step": 4})
    assert (outcome.status, outcome.stage) == (Status.FAILED, "timing synced")
    steps = [(sample.mode, sample.step) for sample in outcome.samples if sample.phase == "step"]
    assert steps == [("warmup", 0), ("warmup", 1), ("synced", 0), ("synced", 1)]


@pytest.mark.process
def test_a_hang_ends_at_its_time_limit(misbehave: Callable[..., Outcome]) -> None:
    outcome = misbehave("spin_in_c", settings={"timeout_s": 4.0})
    assert outcome.status is Status.TIMEOUT
    assert outcome.facts["stage_s"][outcome.stage] > 1  # it was there until it was killed
    assert 4 <= outcome.wall_s < 6


@pytest.fixture
def slow_start(tmp_path: Path, make_attempt: MakeAttempt) -> Callable[[str], Attempt]:
    """An attempt of which a process needs longer to come to its task than it has for that."""
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text("import time\ntime.sleep(6)")
    env = {"PYTHONPATH": f"{tmp_path / 'slow'}:{ROOT}"}
    return lambda method: make_attempt(
        1,
        "accumulation",
        {"timeout_s": 5.0, "env": env, "start_method": method, "instruments": ()},
        count=1,
    )


@pytest.mark.process
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_start_up_time_does_not_count_towards_the_time_limit(
    slow_start: Callable[[str], Attempt], method: str
) -> None:
    outcome = execute(slow_start(method))
    assert (outcome.status, outcome.facts.get("start_method")) == (Status.OK, method), (
        outcome.evidence
    )


@pytest.mark.process
def test_a_process_that_never_reaches_its_task_times_out(
    slow_start: Callable[[str], Attempt], monkeypatch: Any
) -> None:
    monkeypatch.setattr(measurement, "PREPARATION_S", 2.0)
    outcome = execute(slow_start("spawn"))
    assert (outcome.status, outcome.stage) == (Status.TIMEOUT, "")
    assert outcome.evidence["message"] == "not ready to begin after 2 s"
    assert outcome.wall_s < 5


@pytest.mark.process
@pytest.mark.parametrize("how", ["with_grandchild", "with_daemon"])
def test_a_time_limit_also_ends_the_grandchildren(
    how: str, misbehave: Callable[..., Outcome], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert misbehave(how, settings={"timeout_s": 4.0}).status is Status.TIMEOUT
    _wait_until_dead(int((tmp_path / "grandchild.pid").read_text()))


@pytest.mark.process
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere nobody adopts")
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
@pytest.mark.parametrize(
    ("how", "status"), [("leave_a_daemon", Status.OK), ("leave_a_daemon_and_crash", Status.CRASHED)]
)
def test_a_daemon_left_in_another_session_is_killed_when_its_cell_ends(
    start_method: str,
    how: str,
    status: Status,
    misbehave: Callable[..., Outcome],
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = misbehave(how, settings={"start_method": start_method})
    assert (outcome.status, outcome.facts["start_method"]) == (status, start_method)
    assert status is Status.OK or outcome.evidence["signal"] == "SIGABRT"
    _wait_until_dead(int((tmp_path / "grandchild.pid").read_text()))


@pytest.mark.process
def test_memory_of_a_capped_process_that_fills_up_is_an_oom(
    misbehave: Callable[..., Outcome],
) -> None:
    outcome = misbehave("fill", memory_limit_gib=1.0)
    assert outcome.status is Status.OOM
    assert outcome.evidence["asked_bytes"] == 1024**3 // 4
    assert outcome.evidence["allocated_bytes"] > 3 * 1024**3 // 4


@pytest.mark.process
def test_memory_of_a_capped_process_is_an_oom(misbehave: Callable[..., Outcome]) -> None:
    outcome = misbehave("alloc", memory_limit_gib=1.0)
    assert outcome.status is Status.OOM
    assert outcome.evidence["asked_bytes"] == 8 * 1024**3
    assert outcome.evidence["limit_bytes"] == 1024**3


@pytest.mark.parametrize(("limit_gib", "status"), [(1.0, Status.OOM), (None, Status.CRASHED)])
def test_a_thread_that_openmp_cannot_begin_is_an_oom_under_a_cap(
    limit_gib: float | None, status: Status, make_attempt: MakeAttempt
) -> None:
    attempt = make_attempt(memory_limit_gib=limit_gib)
    attempt.path.mkdir(parents=True)
    (attempt.path / LOG_FILE).write_text(
        "\nlibgomp: Thread creation failed: Resource temporarily unavailable\n"
    )
    outcome = build_outcome(attempt, ProcessExit(RankExits([1]), 0.1), 0.0)
    assert (outcome.status, outcome.evidence["exit_code"]) == (status, 1)
    assert outcome.evidence["message"].startswith("libgomp: ") == (status is Status.OOM)


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("", "exited with code 1 without a word"),
        ("step 1\nno data\n \n", "exited with code 1; its last output: no data"),
        (
            "Fatal Python error: no codec\nCurrent thread 0x1:\n  <no Python frame>\n",
            "exited with code 1; its last output: Fatal Python error: no codec",
        ),
    ],
)
def test_a_process_that_exits_is_described_by_its_last_output(
    log: str, message: str, make_attempt: MakeAttempt
) -> None:
    attempt = make_attempt()
    attempt.path.mkdir(parents=True)
    (attempt.path / LOG_FILE).write_text(log)
    outcome = build_outcome(attempt, ProcessExit(RankExits([1]), 0.1), 0.0)
    assert (outcome.status, outcome.evidence["message"]) == (Status.CRASHED, message)


SUPERVISE = """
import json, sys
from pathlib import Path
(Path(sys.argv[1]) / "cgroup.procs").write_text("0")
from orchestrator.execution.measurement import execute
from tasks.spec.attempt import read_attempt
ballast = bytearray(b"x") * 400_000_000
for file in sys.argv[2:]:
    outcome = execute(read_attempt(Path(file).read_text()))
    print(json.dumps({"status": outcome.status, "stage": outcome.stage, "phase": outcome.phase, **outcome.evidence}))
"""


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A control group of 1 GB, where one may make such a thing."""
    root = next(
        (path for path in map(Path, CGROUPS) if os.access(path / "cgroup.procs", os.W_OK)), None
    )
    if root is None:
        pytest.skip("no control group can be made here")
    group = root / f"sweep-test-{os.getpid()}"
    try:
        group.mkdir()
        limit = next(
            path
            for name in ("memory.max", "memory.limit_in_bytes")
            if (path := group / name).exists()
        )
        limit.write_text(str(10**9))
        for name in ("memory.swap.max", "memory.memsw.limit_in_bytes"):
            with suppress(OSError):
                (group / name).write_text(str(10**9) if "memsw" in name else "0")
    except (OSError, StopIteration):
        with suppress(OSError):
            group.rmdir()
        pytest.skip("no control group can be made here")
    yield group
    deadline = time.monotonic() + 10
    while group.exists() and time.monotonic() < deadline:
        with suppress(OSError):
            group.rmdir()
        time.sleep(0.05)


@pytest.mark.process
def test_the_kernels_killer_takes_the_cell_and_its_row_says_so(
    make_attempt: MakeAttempt, small_memory: Path, tmp_path: Path
) -> None:
    """Its supervisor, though it holds more, lives on and measures the next."""
    own = {"size": None, "model": "misbehaving:Model", "settings": {"import_paths": (TESTS,)}}
    attempts = [
        make_attempt(number, model_args={"how": how}, **own)
        for number, how in enumerate(("grow", "well"), start=1)
    ]
    files = [tmp_path / f"{attempt.number}.json" for attempt in attempts]
    for file, attempt in zip(files, attempts, strict=True):
        file.write_text(attempt.to_json())
    done = subprocess.run(
        [sys.executable, "-c", SUPERVISE, small_memory, *files],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    killed, well = map(json.loads, done.stdout.splitlines())
    assert (killed["status"], killed["stage"], killed["phase"]) == (
        "host_oom",
        "warm-up",
        "forward",
    )
    assert killed["message"] == "killed by the kernel for want of host memory"
    assert (killed["signal"], killed["oom_kills"]) == ("SIGKILL", 1)
    assert not os.access("/dev/kmsg", os.R_OK) or any(
        "Killed process" in line for line in killed["kernel_log"]
    )
    assert well["status"] == "ok"


@pytest.mark.process
def test_a_cell_has_the_highest_score_for_the_oom_killer(misbehave: Callable[..., Outcome]) -> None:
    outcome = misbehave("tell_its_score")
    assert outcome.status is Status.OK
    assert "goes at 1000" in (outcome.attempt.path / LOG_FILE).read_text()
    assert Path("/proc/self/oom_score_adj").read_text() != "1000\n"


@pytest.mark.process
def test_a_cell_with_a_precision_that_its_device_lacks_is_skipped(
    make_attempt: MakeAttempt,
) -> None:
    outcome = execute(make_attempt(precision="tf32"))
    assert outcome.status is Status.SKIPPED
    assert outcome.evidence == {"reason": "tf32 exists on CUDA only, not on cpu"}


@pytest.mark.process
@pytest.mark.parametrize("where", ["build", "forward"])
@pytest.mark.parametrize(
    "how", ["multiply_in_tf32", "multiply_in_tf32_by_the_new_interface", "convolve_in_tf32"]
)
def test_an_fp32_that_became_tf32_is_no_result(
    how: str, where: str, misbehave: Callable[..., Outcome]
) -> None:
    """As training scripts have it at their top: the row would say fp32."""
    outcome = misbehave(how, model_args={"where": where})
    assert (outcome.status, outcome.stage) == (
        Status.FAILED,
        "build" if where == "build" else "warm-up",
    )
    setting = (
        "cudnn_allow_tf32 False"
        if how.startswith("convolve")
        else "float32_matmul_precision highest"
    )
    assert f"precision fp32 needs {setting}, but it was set to " in outcome.evidence["message"]
    assert outcome.evidence["message"].endswith(": remove that from misbehaving:Model")


@pytest.mark.process
@pytest.mark.parametrize(
    ("pass_", "trains"), [("forward", False), ("forward_grad", True), ("train_step", True)]
)
def test_a_model_of_ones_own_knows_whether_it_trains(
    pass_: str, trains: bool, misbehave: Callable[..., Outcome]
) -> None:
    outcome = misbehave("tell_whether_it_trains", **{"pass": pass_})
    assert outcome.status is Status.OK
    assert set((outcome.attempt.path / LOG_FILE).read_text().split()) == {str(trains)}


@pytest.mark.process
def test_a_missing_model_factory_fails_the_cell_at_the_build_stage(
    make_attempt: MakeAttempt,
) -> None:
    outcome = execute(make_attempt(size=None, model="no_such_module:Model"))
    assert (outcome.status, outcome.stage) == (Status.FAILED, "build")
    assert "no_such_module" in outcome.evidence["message"]


@pytest.mark.process
def test_without_instruments_nothing_can_be_ok(make_attempt: MakeAttempt) -> None:
    outcome = execute(make_attempt(settings={"instruments": ()}))
    assert outcome.status is Status.FAILED
    assert "measured nothing" in outcome.evidence["message"]


@pytest.mark.process
def test_a_torn_journal_is_read_as_far_as_it_is_whole(make_attempt: MakeAttempt) -> None:
    attempt = make_attempt()
    execute(attempt)
    whole = (attempt.path / JOURNAL_FILE).read_bytes()
    assert recover(attempt).status is Status.OK  # type: ignore[union-attr]
    for cut in (len(whole) - 1, len(whole) - 20, len(whole) // 2, 10, 0):
        (attempt.path / JOURNAL_FILE).write_bytes(whole[:cut])
        recovered = recover(attempt)
        assert recovered is None or cut == len(whole) - 1


@pytest.mark.process
def test_kernels_come_through_the_journal_whole_or_torn(make_attempt: MakeAttempt) -> None:
    attempt = make_attempt(settings={"instruments": ("timing", "kernels")})
    outcome = execute(attempt)
    assert outcome.status is Status.OK, outcome.evidence
    assert {row.phase for row in outcome.kernels} >= {"forward", "backward", "optimizer"}
    assert [path.name for path in attempt.path.glob("trace_*")]
    journal = attempt.path / JOURNAL_FILE
    whole = journal.read_bytes()
    assert read_journal(journal).kernels == outcome.kernels
    place = whole.index(b'"kernels": [')
    journal.write_bytes(whole[: place + 500])  # killed while it wrote them
    torn = read_journal(journal)
    assert torn.kernels == ()
    assert torn.samples
    assert recover(attempt) is None


@pytest.mark.process
@pytest.mark.parametrize(
    ("how", "number", "start_method"),
    [
        ("with_grandchild", signal.SIGKILL, "fork"),
        ("sleep", signal.SIGTERM, "fork"),
        ("spin_in_c", signal.SIGKILL, "fork"),
        ("stop_itself", signal.SIGKILL, "fork"),
        ("sleep", signal.SIGTERM, "spawn"),
        ("stop_itself", signal.SIGKILL, "spawn"),
        ("with_daemon", signal.SIGKILL, "spawn"),
    ],
)
def test_all_descendants_die_when_their_supervisor_is_killed(
    make_attempt: MakeAttempt, tmp_path: Path, how: str, number: int, start_method: str
) -> None:
    mark = tmp_path / "mark"
    settings = {"import_paths": (TESTS,), "start_method": start_method}
    attempt = make_attempt(
        size=None,
        model="misbehaving:Model",
        model_args={"how": how, "mark": str(mark)},
        settings=settings,
    )
    (tmp_path / ATTEMPT_FILE).write_text(attempt.to_json())
    with subprocess.Popen(
        [sys.executable, "-c", EXECUTE, str(tmp_path / ATTEMPT_FILE)], cwd=tmp_path
    ) as supervisor:
        try:
            started = {_wait_for_pid(mark)}
            if how in ("with_grandchild", "with_daemon"):
                started.add(_wait_for_pid(tmp_path / "grandchild.pid", end=""))
            time.sleep(1)
            descendants = {
                process.pid for process in psutil.Process(supervisor.pid).children(recursive=True)
            }
            assert started <= descendants
        finally:
            os.kill(supervisor.pid, number)
            supervisor.wait(10)
    _wait_until_dead(*descendants)


@pytest.mark.process
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_module_of_the_user_is_not_hidden_by_a_file_in_the_clone_of_this_program(
    method: str, make_attempt: MakeAttempt, tmp_path: Path
) -> None:
    """The clone has a package `tests`, too."""
    (tmp_path / "tests.py").write_text("from misbehaving import Model")
    folders = (str(tmp_path), TESTS)
    settings = {"import_paths": folders, "start_method": method}
    outcome = execute(make_attempt(size=None, model="tests:Model", settings=settings))
    assert outcome.status is Status.OK, outcome.evidence
    assert outcome.facts["model_source"] == source_digest("tests:Model", folders)


@pytest.mark.process
def test_a_folder_with_modules_named_like_ours(
    make_attempt: MakeAttempt, tmp_path: Path, monkeypatch: Any
) -> None:
    for name in ("model", "tasks", "torch"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('shadowed')")
    monkeypatch.chdir(tmp_path)
    assert execute(make_attempt(settings={"import_paths": (str(tmp_path),)})).status is Status.OK


@pytest.mark.process
def test_by_hand_prints_the_same_measurement(make_attempt: MakeAttempt) -> None:
    attempt = make_attempt()
    execute(attempt)
    before = (attempt.path / JOURNAL_FILE).read_bytes()
    script = (attempt.path / RERUN_FILE).read_text()
    done = subprocess.run(script, shell=True, capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(done.stdout.splitlines()[-1])["status"] == "ok"
    assert (attempt.path / JOURNAL_FILE).read_bytes() == before


def _wait_until_dead(*pids: int) -> None:
    deadline = time.monotonic() + 5
    while not all(map(has_ended, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(map(has_ended, pids))


def _wait_for_pid(mark: Path, end: str = "\n") -> int:
    deadline = time.monotonic() + 100
    while not (mark.exists() and mark.read_text().endswith(end) and mark.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return int(mark.read_text())


LIMITS = (errno.E2BIG, errno.EMFILE, errno.EAGAIN, errno.ENOMEM)
BROKEN_INTERPRETER = (errno.ENOENT, errno.ENOEXEC, errno.EACCES)


def refuse(number: int) -> Callable[..., Any]:
    def start(command: list[str], **_: Any) -> Any:
        raise OSError(number, os.strerror(number), command[0])

    return start


@pytest.mark.parametrize("number", [*LIMITS, *BROKEN_INTERPRETER])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_that_cannot_be_started_is_no_fault_of_a_folder(
    number: int, method: str, make_attempt: MakeAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    FORK_SERVERS.close()
    monkeypatch.setattr(subprocess, "Popen", refuse(number))
    outcome = execute(make_attempt(settings={"start_method": method}))
    assert outcome.status is Status.LOST
    expected = f"no process could be started: {os.strerror(number)}"
    assert outcome.evidence["message"] == expected


def test_a_folder_that_cannot_be_written_is_named(make_attempt: MakeAttempt) -> None:
    attempt = make_attempt()
    attempt.path.parent.mkdir(parents=True)
    attempt.path.touch()
    outcome = execute(attempt)
    assert str(outcome.evidence["message"]).startswith("its folder cannot be written: ")
    assert str(attempt.path) in str(outcome.evidence["message"])


@pytest.mark.parametrize(("stage", "is_checked"), [("warm-up", False), ("start", True)])
def test_a_host_is_checked_only_if_a_cell_whose_minder_died_had_not_begun(
    make_attempt: MakeAttempt, monkeypatch: pytest.MonkeyPatch, stage: str, is_checked: bool
) -> None:
    """The check takes seconds, and the row would be stored after it."""
    checked: list[Path] = []

    def lose(attempt: Attempt) -> Outcome:
        with (attempt.path / JOURNAL_FILE).open("w") as stream:
            Journal(stream).stage(stage)
        raise ForkServerLost("its minder died")

    monkeypatch.setattr(measurement, "_run_measuring_process", lose)
    monkeypatch.setattr(measurement, "host_failure", checked.append)
    outcome = measure(make_attempt(), Slot(1))
    assert isinstance(outcome, Outcome)
    assert (outcome.status, outcome.stage) == (Status.LOST, stage)
    assert bool(checked) == is_checked


def test_a_folder_that_is_no_utf8_is_named_in_utf8(make_attempt: Callable[..., Attempt]) -> None:
    outcome = lost_outcome(make_attempt(), "its folder cannot be written: 'r\udcff'", 1.0)
    assert outcome.evidence["message"] == r"its folder cannot be written: 'r\udcff'"


@pytest.mark.parametrize("number", [*LIMITS, *BROKEN_INTERPRETER])
def test_a_host_on_which_no_process_starts_is_refused_with_the_reason(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", refuse(number))
    reason = f"no process could be started here: {os.strerror(number)}"
    with pytest.raises(PlatformError, match=reason):
        probe_here()


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            "Traceback\nImportError: libx.so: failed to map segment from shared object",
            "this process reached a limit: Cannot allocate memory. Free some memory",
        ),
        ("Traceback\nImportError: no name x", "torch does not work here: ImportError: no name x"),
        (
            "ValueError:\nInvalid log settings: odd,\ntry TORCH_LOGS=help\nValid settings:\nall, aot",
            r"here with TORCH_LOGS=odd: Invalid log settings: odd,. Unset TORCH_LOGS, or correct it",
        ),
    ],
)
def test_a_host_on_which_torch_is_not_imported_is_refused_with_the_reason(
    output: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_LOGS", "odd")
    ended = subprocess.CompletedProcess([], 1, stdout="", stderr=output)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(PlatformError, match=message):
        probe_here()


@pytest.mark.process
def test_where_no_process_can_be_minded_the_cell_is_a_child(
    make_attempt: MakeAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS has no minders."""
    monkeypatch.setattr(measurement, "HAS_MINDERS", False)
    outcome = execute(make_attempt(1))
    assert (outcome.status, outcome.facts["start_method"]) == (Status.OK, "spawn")
    late = execute(make_attempt(2, settings={"timeout_s": 0.2}))
    assert (late.status, late.evidence["message"]) == (Status.TIMEOUT, "not done after 0.2 s")
