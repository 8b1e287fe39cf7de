"""Runs a child under Nsight Systems, if nsys is on the PATH, and turns its report into rows."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

from orchestrator.common.errors import PlatformError, RunError
from tasks.spec.attempt import Attempt, artifact_name
from tasks.spec.outcome import Outcome
from tasks.spec.tables import Sample
from tasks.traces.attribution import attribute
from tasks.traces.nsys import read_nsys
from tasks.traces.ranges import DeviceTrace
from tasks.traces.summary import to_rows, to_samples

INSTRUMENT = "nsys"
_REPORT = "nsys-rep"
# Sampling of stacks and context switches would disturb the timing. By default nsys waits for
# everything that the process started, which may never end.
_PROFILE = (
    "profile",
    "--trace=cuda,nvtx",
    "--sample=none",
    "--cpuctxsw=none",
    "--force-overwrite=true",
    "--wait=primary",
)
# By default nsys ends the process together with the captured range.
_CAPTURE = ("--capture-range=cudaProfilerApi", "--capture-range-end=stop")


def program() -> str | None:
    """Return the path of nsys, or None if it is not installed."""
    return shutil.which("nsys")


def command(attempt: Attempt) -> list[str]:
    """Return the command that runs the child, or an empty list without nsys."""
    nsys = program()
    if nsys is None:
        return []
    return [nsys, *_PROFILE, *_CAPTURE, "--output", str(_report_file(attempt))]


def with_kernels(outcome: Outcome) -> Outcome:
    """Return the outcome with the kernels that nsys recorded.

    A report that cannot be read becomes a missing number with the reason.
    """
    if program() is None:
        return outcome
    try:
        works = []
        for trace in read_report(_report_file(outcome.attempt)).values():
            works += attribute(trace.timeline)
    except Exception as error:  # whatever it is, the cell's own measurements must be stored
        missing = Sample("kernels", "busy", "ratio", None, note=str(error))
        return replace(outcome, samples=(*outcome.samples, missing))
    steps = _annotated_steps(outcome)
    samples = (*outcome.samples, *to_samples(works, steps, on_device=True))
    return replace(outcome, samples=samples, kernels=(*outcome.kernels, *to_rows(works, steps)))


def _annotated_steps(outcome: Outcome) -> int | None:
    for sample in outcome.samples:
        if sample.metric == "annotated_steps" and sample.value:
            return int(sample.value)
    return None


def read_report(
    file: Path, phases: Mapping[str, str] = MappingProxyType({})
) -> Mapping[str, DeviceTrace]:
    """Read a report of nsys (`.nsys-rep`) or its SQLite export, by process and GPU.

    phases: the phase for which each name of an NVTX range stands. Raises RunError or PlatformError.
    """
    if not file.is_file():
        remedy = "Name the .sqlite or .nsys-rep file that nsys wrote"
        raise RunError(f"{file}: does not exist", remedy)
    try:
        if file.suffix != f".{_REPORT}":
            return read_nsys(file, phases)
        with TemporaryDirectory() as scratch:
            return read_nsys(_export(file, Path(scratch) / "export.sqlite"), phases)
    except ValueError as error:
        remedy = "Export it with: nsys export --type sqlite FILE.nsys-rep"
        raise RunError(str(error), remedy) from error


def _report_file(attempt: Attempt) -> Path:
    return attempt.path / artifact_name("nsys", attempt.cell.params, _REPORT)


def _export(report: Path, target: Path) -> Path:
    nsys = program()
    if nsys is None:
        raise PlatformError(
            f"{report}: needs nsys to be read, which is not on the PATH",
            f"Where nsys is: nsys export --type sqlite {report.name}, and import the .sqlite file",
        )
    arguments = (nsys, "export", "--type", "sqlite", "--output", str(target), str(report))
    done = subprocess.run(arguments, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or [""]
        raise RunError(f"{report}: nsys cannot export it: {lines[-1]}")
    return target
