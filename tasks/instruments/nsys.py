"""Annotate steps with NVTX ranges in a process under Nsight Systems.

orchestrator/execution/nsys.py starts such a process and reads its export.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

from tasks.harness.stage import Session, Stage
from tasks.instruments.nvtx import annotate
from tasks.spec.tables import Sample


def annotate_for_nsys(session: Session) -> list[Sample]:
    """Run annotated steps, or return the reason why there is no Nsight Systems."""
    if shutil.which("nsys") is None:
        note = "nsys is not on the PATH: see `sweep doctor`"
        return [Sample("nsys", "annotated_steps", "steps", None, note=note)]
    return [replace(sample, instrument="nsys") for sample in annotate(session)]


STAGES = (Stage("nsys", 85, annotate_for_nsys),)
