"""Which frames of a stack are of the user's code."""

from __future__ import annotations

import pytest

from orchestrator.common.frames import own_frames, without_other_frames

TORCH = '  File "/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1789 in _call_impl'
PACKAGE = '  File "/venv/lib/python3.12/site-packages/mamba/model.py", line 7 in forward'
STANDARD = '  File "/usr/lib/python3.12/threading.py", line 3 in wait'
FROZEN = '  File "<frozen runpy>", line 88 in _run_code'
OWN = '  File "/home/me/tasks/gpt.py", line 11 in forward'


def stack(root: str) -> list[str]:
    harness = [
        f'  File "{root}/tasks/training/losses.py", line 47 in __call__',
        f'  File "{root}/model/attention.py", line 5 in forward',
        f'  File "{root}/tasks/__main__.py", line 116 in measure_forked',
    ]
    head = ["Fatal Python error: Aborted", "Current thread 0x1 (most recent call first):"]
    return [*head, STANDARD, OWN, TORCH, TORCH, PACKAGE, *harness, FROZEN]


@pytest.mark.parametrize("root", ["/opt/sweep", "/venv/lib/python3.12/site-packages", "/home/me/x"])
def test_frames_are_own_unless_of_this_program_torch_or_python(root: str) -> None:
    assert own_frames(stack(root)) == [OWN.strip(), PACKAGE.strip()]


def test_other_frames_of_a_dump_are_counted() -> None:
    assert without_other_frames(["before", *stack("/opt/sweep"), "after"]) == [
        "before",
        "Fatal Python error: Aborted",
        "Current thread 0x1 (most recent call first):",
        "  … 1 frame of torch, Python or this program",
        OWN,
        "  … 2 frames of torch, Python or this program",
        PACKAGE,
        "  … 4 frames of torch, Python or this program",
        "after",
    ]


def test_a_traceback_in_a_log_stays_whole() -> None:
    lines = ['  File "/opt/lib/python3.12/site-packages/torch/a.py", line 3, in f', "    raise"]
    assert without_other_frames(lines) == lines
    assert own_frames(lines) == []
