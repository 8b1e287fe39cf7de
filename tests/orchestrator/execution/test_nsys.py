"""A child under Nsight Systems, for which a program stands in: it runs what it is given, and writes a report."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from click.testing import Result

from orchestrator.execution.measurement import execute, recover
from tasks.spec.attempt import LOG_FILE, Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status
from tests.conftest import ROOT

MakeAttempt = Callable[..., Attempt]
NSYS = {"instruments": ("memory", "nsys")}

STAND_IN = f"""\
    #!{sys.executable}
    import subprocess, sys
    sys.path.insert(0, {str(ROOT)!r})
    from pathlib import Path
    from tests.support.traces import NsysExport

    output = Path(sys.argv[sys.argv.index("--output") + 1])
    if sys.argv[1] == "export":
        if not Path(sys.argv[-1]).read_text().startswith("a report"):
            sys.exit("it is damaged")
        written = NsysExport(output)
        written.range("phase::forward", 0, 100_000)
        written.range("mod::layers.0.attn.q_proj", 10_000, 40_000)
        written.kernel("ampere_sgemm_128x64_tn", 20_000, 50_000, 60_000)
    else:
        print("profiled with", *sys.argv[2:sys.argv.index("--output")], flush=True)
        assert "--wait=primary" in sys.argv  # or it would wait for the watcher at the end of the lifeline as well
        code = subprocess.run(sys.argv[sys.argv.index("--output") + 2:], close_fds=False).returncode
        output.write_text("a report" if code == 0 else "of what did not end")
        sys.exit(code)
"""


@pytest.fixture
def nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "bin" / "nsys"
    program.parent.mkdir()
    program.write_text(textwrap.dedent(STAND_IN))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return program


def processes() -> list[str]:
    found = psutil.process_iter(["cmdline"])
    return [" ".join(process.info["cmdline"] or ()) for process in found]


def report_of(outcome: Outcome) -> Path:
    (found,) = outcome.attempt.path.glob("nsys_*.nsys-rep")
    return found


@pytest.mark.process
def test_the_nsys_report_is_kept_and_becomes_rows(make_attempt: MakeAttempt, nsys: Path) -> None:
    outcome = execute(make_attempt(settings=NSYS))
    assert outcome.status is Status.OK, outcome.evidence
    assert outcome.facts["start_method"] == "spawn"
    log = (outcome.attempt.path / LOG_FILE).read_text()
    assert "--trace=cuda,nvtx" in log
    assert "--capture-range-end=stop" in log  # or it would end the child with the range
    assert report_of(outcome).read_text() == "a report"
    (row,) = outcome.kernels
    assert (row.phase, row.module, row.kernel_class, row.total_ns) == (
        "forward",
        "q projection",
        "GEMM",
        10_000,
    )
    numbers = {(s.metric, s.phase): s.value for s in outcome.samples if s.instrument == "kernels"}
    assert numbers["attributed_to_module", ""] == 1.0
    assert any(sample.instrument == "memory" for sample in outcome.samples)
    again = recover(outcome.attempt)  # as if the driver had died before it could keep it
    assert again is not None
    assert again.kernels == outcome.kernels


def misbehaving(make_attempt: MakeAttempt, how: str, **settings: object) -> Attempt:
    own = {
        "size": None,
        "model": "misbehaving:Model",
        "model_args": {"how": how, "vocab_size": 200},
    }
    return make_attempt(
        settings={**NSYS, "import_paths": (str(ROOT / "tests" / "support"),), **settings}, **own
    )


@pytest.mark.process
def test_a_report_that_cannot_be_read_hides_nothing(make_attempt: MakeAttempt, nsys: Path) -> None:
    outcome = execute(misbehaving(make_attempt, "leave"))
    assert (outcome.status, outcome.evidence["exit_code"]) == (Status.CRASHED, 7)
    (missing,) = (sample for sample in outcome.samples if sample.metric == "busy")
    assert missing.value is None
    assert "it is damaged" in missing.note


@pytest.mark.process
def test_the_time_limit_ends_nsys_and_its_child(make_attempt: MakeAttempt, nsys: Path) -> None:
    outcome = execute(misbehaving(make_attempt, "sleep", timeout_s=8.0))
    assert outcome.status is Status.TIMEOUT
    deadline = time.monotonic() + 5
    while [line for line in processes() if str(outcome.attempt.path) in line]:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.process
def test_without_nsys_a_cell_is_measured_and_the_lack_is_reported_once(
    sweep_here: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(
        "name: c\ninstruments: [memory, nsys]\ndefaults: {device: cpu, size: tiny, vocab_size: 100, context_length: 16}\n"
        "grids: [{task: train_step, axes: {precision: [fp32]}}]\n"
    )
    done = sweep_here("run", "c.yaml", "--scheduler", "serial")
    assert done.exit_code == 0, done.output
    assert done.output.count("nsys is not on the PATH") == 1


def test_nsys_together_with_timing_or_kernels_is_refused(
    sweep_here: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(
        "name: c\ninstruments: [timing, kernels, nsys]\ngrids: [{task: train_step, axes: {size: [tiny]}}]\n"
    )
    done = sweep_here("plan", "c.yaml")
    assert done.exit_code == 2
    assert "c.yaml:2" in done.output
    assert "nsys cannot go with timing or kernels" in done.output
