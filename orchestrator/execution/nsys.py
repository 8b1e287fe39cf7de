"""Nsight Systems, where it is on the PATH: a child runs under it, and what it wrote becomes rows."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from orchestrator.common.errors import PlatformError, RunError
from tasks.spec.artifact_names import artifact_name
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.tables import Sample
from tasks.traces.attribution import attribute
from tasks.traces.nsys import read_nsys
from tasks.traces.summary import to_rows, to_samples
from tasks.traces.timeline import Timeline

INSTRUMENT = "nsys"
_REPORT = "nsys-rep"
# By default nsys ends the process with the range that is captured, samples its stacks, and waits for whatever it started.
_PROFILE = (
    "profile",
    "--trace=cuda,nvtx",
    "--sample=none",
    "--cpuctxsw=none",
    "--force-overwrite=true",
    "--wait=primary",
)
_CAPTURE = ("--capture-range=cudaProfilerApi", "--capture-range-end=stop")


def program() -> str | None:
    return shutil.which("nsys")


def command(attempt: Attempt) -> list[str]:
    """What the child's own command is put behind; nothing where nobody asked, or nsys is not there."""
    nsys = program() if INSTRUMENT in attempt.settings.instruments else None
    return [nsys, *_PROFILE, *_CAPTURE, "--output", str(_report(attempt))] if nsys else []


def with_kernels(outcome: Outcome) -> Outcome:
    """The outcome with what nsys saw. What cannot be read is a number that is missing, with the reason."""
    if not command(outcome.attempt):
        return outcome
    try:
        works = attribute(read_report(_report(outcome.attempt)))
    except Exception as error:  # whatever it is: what was measured must not be lost for it
        missing = Sample("kernels", "busy", "ratio", None, note=str(error))
        return replace(outcome, samples=(*outcome.samples, missing))
    steps = next(
        (int(s.value) for s in outcome.samples if s.metric == "annotated_steps" and s.value), None
    )
    samples = (*outcome.samples, *to_samples(works, steps, on_device=True))
    return replace(outcome, samples=samples, kernels=(*outcome.kernels, *to_rows(works, steps)))


def read_report(file: Path) -> Timeline:
    """Of a report of nsys (`.nsys-rep`), or of its export. Raises RunError or PlatformError."""
    if not file.is_file():
        raise RunError(
            f"{file}: is not there", "Name the .sqlite or .nsys-rep file that nsys wrote"
        )
    try:
        if file.suffix != f".{_REPORT}":
            return read_nsys(file)
        with TemporaryDirectory() as scratch:
            return read_nsys(_export(file, Path(scratch) / "export.sqlite"))
    except ValueError as error:
        raise RunError(
            str(error), "Export it with: nsys export --type sqlite FILE.nsys-rep"
        ) from error


def _report(attempt: Attempt) -> Path:
    return attempt.path / artifact_name("nsys", attempt.cell.params, _REPORT)


def _export(report: Path, to: Path) -> Path:
    nsys = program()
    if nsys is None:
        raise PlatformError(
            f"{report}: needs nsys to be read, which is not on the PATH",
            f"Where nsys is: nsys export --type sqlite {report.name}, and import the .sqlite file",
        )
    arguments: Sequence[str] = (
        nsys,
        "export",
        "--type",
        "sqlite",
        "--output",
        str(to),
        str(report),
    )
    done = subprocess.run(arguments, capture_output=True, text=True)
    if done.returncode:
        raise RunError(
            f"{report}: nsys cannot export it: {(done.stderr or done.stdout).strip().rpartition(chr(10))[2]}"
        )
    return to
