"""A rank whose minder asks for its flight record while it writes one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

ASKED_WHILE_IT_WRITES = """
import json, os, signal, sys, time
from pathlib import Path
from torch._C import _distributed_c10d
from tasks.process.flight_record import answer_signal, record_flight

file, broken = Path(sys.argv[1]), 0
for number in range(40):
    file.unlink(missing_ok=True)
    rank = os.fork()
    if rank == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        answer_signal(signal.SIGUSR2, file)
        while True:
            record_flight(file)
            time.sleep(0)
    while not file.exists():
        time.sleep(0.001)
    time.sleep(0.002 * (number % 7))
    os.kill(rank, signal.SIGUSR2)
    os.waitpid(rank, 0)
    try:
        json.loads(file.read_bytes())
    except ValueError:
        broken += 1
print(broken)
"""


@pytest.mark.process
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forking is for Linux")
def test_a_record_is_whole_if_the_minder_asks_while_it_is_written(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ASKED_WHILE_IT_WRITES, str(tmp_path / "flight.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr
