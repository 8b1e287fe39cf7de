"""The cells' rows of the README's table of faults, each a sweep: status and evidence, good cells between that never notice, and
the next run, which completes it. Faults of the driver, of its folder and of its hosts are in the tests of those."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from orchestrator.store.run import Run
from tasks.process.log_file import END_BYTES
from tasks.spec.attempt import LOG_FILE
from tasks.spec.status import Status
from tests.conftest import ROOT, has_ended
from tests.support import misbehaving

pytestmark = pytest.mark.process

Sweep = Callable[..., Result]
GIB = 1024**3
CONFIG = """
name: faults
limits: {timeout_s: %s, host_memory_gib: 1.0}
defaults: {device: cpu, context_length: 8, batch_size: 1, warmup_steps: 1, measured_steps: 2, vocab_size: 100}
grids:
  - task: train_step
    fixed: {model: "misbehaving:Model"}
    axes:
      model_args: %s
"""


@dataclass(frozen=True)
class Fault:
    """how: of tests/support/misbehaving.py, with `args`, and only in the first process of the cell. What the row is to say of it.

    ended: stage and phase. log: what the end of the log has among other things.
    """

    how: str
    status: str
    evidence: dict[str, Any] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)
    ended: tuple[str, str] = ("warm-up", "forward")
    log: str = ""


ASKED = {"asked_bytes": int(20.5 * GIB), "exception": "OutOfMemoryError"}


def exit_evidence(code: int) -> dict[str, str]:
    """The message has the place, because a number alone explains nothing."""
    lines = Path(misbehaving.__file__).read_text().splitlines()
    place = f"misbehaving.py:{lines.index(f'        sys.exit({code})') + 1}"
    return {"exception": "SystemExit", "message": f"SystemExit: {code} ({place})"}


HANG = {"message": "not done after 4 s", "timeout_s": 4.0}
FAULTS: dict[str, Sequence[Fault]] = {
    "out of memory": [
        Fault("cuda_oom", "oom", ASKED, {"where": "build"}, ("build", "")),
        *(
            Fault("cuda_oom", "oom", ASKED, {"where": at}, ("warm-up", at))
            for at in ("forward", "backward", "optimizer")
        ),
        Fault(
            "cuda_oom",
            "oom",
            ASKED,
            {"where": "backward", "step": 1},
            ("timing synced", "backward"),
        ),
    ],
    "host memory": [
        Fault("grow", "host_oom", {"message": "its resident set passed host_memory_gib: 1.0"}),
        Fault(
            "python_refuses",
            "host_oom",
            {"exception": "MemoryError"},
            {"where": "optimizer"},
            ("warm-up", "optimizer"),
        ),
    ],
    "a sudden end": [
        Fault("sigkill", "crashed", {"signal": "SIGKILL", "message": "killed by SIGKILL"}),
        Fault("segfault", "crashed", {"signal": "SIGSEGV"}, log="Segmentation fault"),
        Fault(
            "abort",
            "crashed",
            {"signal": "SIGABRT"},
            {"where": "backward"},
            ("warm-up", "backward"),
            "Fatal Python error",
        ),
        Fault("sigrt", "crashed", {"signal": "SIGRTMIN+6", "message": "killed by SIGRTMIN+6"}),
        Fault("leave", "crashed", {"exit_code": 7}),
        Fault("leave_well", "crashed", {"exit_code": 0}),
    ],
    "an exception": [
        Fault("sys_exit", "failed", exit_evidence(3)),
        Fault("sys_exit_well", "failed", exit_evidence(0)),
        Fault(
            "fail",
            "failed",
            {"exception": "ValueError", "message": "wrong on purpose"},
            log="a last line on stdout",
        ),
        Fault("unspeakable", "failed", {"exception": "Unspeakable"}),
        Fault(
            "speechless",
            "failed",
            {"exception": "Speechless", "message": "its message cannot be read: ValueError"},
        ),
    ],
    "a hang": [
        Fault("sleep", "timeout", HANG, log="in sleep"),
        Fault(
            "spin_in_c",
            "timeout",
            HANG,
            {"where": "backward"},
            ("warm-up", "backward"),
            "in spin_in_c",
        ),
        Fault("stop_itself", "timeout", HANG),  # a stopped process cannot say where it stands
    ],
    "a flood of output": [Fault("flood", "ok", ended=("", ""))],
    "a clock that jumps": [Fault("jump_the_clock", "ok", ended=("", ""))],
    "a minder that goes away": [Fault("kill_its_parent", "lost", ended=("warm-up", ""))],
    "a process left behind": [Fault("leave_a_daemon", "ok", ended=("", ""))],
}


@pytest.mark.parametrize("row", FAULTS)
def test_a_fault_has_its_expected_row_and_leaves_other_cells_untouched(
    row: str, write_config: Callable[..., Path], sweep_here: Sweep, tmp_path: Path
) -> None:
    (tmp_path / "misbehaving.py").symlink_to(
        ROOT / "tests" / "support" / "misbehaving.py"
    )  # so that the parent of all sweeps here will do
    faults, run = FAULTS[row], Run(tmp_path / "results" / "faults")
    config = write_config(
        CONFIG % (4 if row == "a hang" else 60, json.dumps(list(cells_of(faults, tmp_path))))
    )
    bad = any(Status(fault.status).is_retried for fault in faults)

    done = sweep_here("run", config, "--scheduler", "serial")
    assert done.exit_code == bad, (done.output, done.exception)
    for place, fault in enumerate(faults):
        attempt = attempts_of(run, place)[0]
        check(attempt, fault, run.attempt_folder(attempt["cell"], 1))
    untouched = rows_of_good_cells(run)
    assert len(untouched) == 2 * (len(faults) + 1)

    done = sweep_here("run", config, "--scheduler", "serial")
    assert done.exit_code == 0, (done.output, done.exception)
    for place, fault in enumerate(faults):
        statuses = [attempt["status"] for attempt in attempts_of(run, place)]
        assert statuses == [fault.status, *(["ok"] if Status(fault.status).is_retried else [])], (
            fault
        )
    if row == "out of memory":
        assert sweep_here("run", config, "--scheduler", "serial", "--retry", "oom").exit_code == 0
    assert {attempts_of(run, place)[-1]["status"] for place in range(len(faults))} == {"ok"}
    assert rows_of_good_cells(run) == untouched


def cells_of(faults: Sequence[Fault], folder: Path) -> Any:
    """The arguments of each fault between good cells."""
    for place, fault in enumerate(faults):
        yield {"how": "well", "step": 100 + place, "vocab_size": 100}
        yield {
            "how": fault.how,
            "mark": str(folder / f"fault {place}"),
            "once": True,
            "vocab_size": 100,
            **fault.args,
        }
    yield {"how": "well", "step": 100 + len(faults), "vocab_size": 100}


def attempts_of(run: Run, place: int) -> list[dict[str, Any]]:
    """Of one fault, the first first."""
    rows = run.read("attempts").sort_values("attempt").to_dict("records")
    return [
        row
        for row in rows
        if json.loads(row["params"])["model_args"].get("mark", "").endswith(f"fault {place}")
    ]


def check(attempt: dict[str, Any], fault: Fault, folder: Path) -> None:
    evidence = json.loads(attempt["evidence"])
    assert attempt["status"] == fault.status, (fault, evidence)
    assert (attempt["stage"], attempt["phase"]) == fault.ended, fault
    assert fault.evidence.items() <= evidence.items(), (fault, evidence)
    assert fault.log in evidence.get("log_tail", ""), fault
    if fault.how == "flood":
        check_flood((folder / LOG_FILE).read_text(), json.loads(attempt["facts"]))
    if fault.how == "grow":
        assert evidence["rss_bytes"] > GIB
    if fault.status == "failed":
        assert "Traceback" in evidence["traceback"]
    if fault.status == "lost":
        assert "went away" in evidence["message"]
    if fault.how == "leave_a_daemon":  # by the folder that the sweep was called in
        assert has_ended(int(folder.parents[4].joinpath("grandchild.pid").read_text()))


def check_flood(log: str, facts: dict[str, Any]) -> None:
    assert log.startswith("the first line\nflood\n")
    assert log.endswith("flood\nthe last line\n")
    assert "bytes that were printed here are left out]" in log
    assert len(log) < 5 * END_BYTES
    assert facts["log_left_out_bytes"] > 900 * 1024**2


def rows_of_good_cells(run: Run) -> dict[tuple[str, str], str]:
    """Return all stored rows of each good cell, by table and cell."""
    rows = run.read("attempts").to_dict("records")
    good = {row["cell"] for row in rows if json.loads(row["params"])["model_args"]["how"] == "well"}
    assert {row["status"] for row in rows if row["cell"] in good} == {"ok"}
    found = {}
    for table in ("attempts", "samples"):
        for cell, own in run.read(table).groupby("cell"):
            if cell in good:
                found[table, str(cell)] = own.to_csv(index=False)
    return found
