"""Cores and niceness of a measuring process: each in a process of its own, which alone is changed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from orchestrator.execution.measurement import execute
from tasks.process.cpu_affinity import spans
from tasks.spec.attempt import Attempt
from tasks.spec.status import Status
from tests.conftest import ROOT

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="pinning is for Linux")


def output_of(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return done.stdout.strip()


def test_cores_as_the_kernel_writes_them() -> None:
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert spans([4]) == "4"


@pytest.mark.process
def test_a_cell_keeps_to_its_cores_and_its_row_says_which(
    make_attempt: Callable[..., Attempt],
) -> None:
    last = max(os.sched_getaffinity(0))
    outcome = execute(make_attempt(settings={"cores": (last,)}))
    assert outcome.status is Status.OK
    assert (outcome.facts["pinned_cores"], outcome.facts["cores"]) == (str(last), 1)
    free = execute(make_attempt(2))
    assert (free.facts["pinned_cores"], free.facts["cores"]) == (None, len(os.sched_getaffinity(0)))


def test_cores_that_are_not_here_are_left() -> None:
    program = "from tasks.process.cpu_affinity import pin_to_cores; import os; before = os.sched_getaffinity(0)"
    assert (
        output_of(f"{program}; print(pin_to_cores([4000]), os.sched_getaffinity(0) == before)")
        == "{'pinned_cores': None} True"
    )


def test_reset_niceness_restores_niceness_0_where_that_is_allowed() -> None:
    program = "import os; from tasks.process.cpu_affinity import reset_niceness; os.nice(5); reset_niceness(); print(os.nice(0))"
    allowed = "import os\nos.nice(5)\ntry: os.setpriority(os.PRIO_PROCESS, 0, 0)\nexcept OSError: print('no')"
    assert output_of(program) == ("5" if output_of(allowed) == "no" else "0")
