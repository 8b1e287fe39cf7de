"""A process with a lifeline ends with it, and its code has no child to wait for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

CODE = """
import os, sys, time
from tasks.process.lifeline import die_with_parent
die_with_parent(int(sys.argv[1]))
try:
    os.wait()
except ChildProcessError:
    print("no child", flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_with_a_lifeline_ends_with_it_and_has_no_child() -> None:
    theirs, ours = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, str(theirs)],
        stdout=subprocess.PIPE,
        pass_fds=[theirs],
        start_new_session=True,
        text=True,
    )
    os.close(theirs)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "no child\n"
        os.close(ours)
        assert process.wait(30) == -signal.SIGKILL
