"""Checks what commands import.

The commands of a group run in one process: each may import the modules of the one before it, and more.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.conftest import ROOT

FOR_MEASURING = {"torch", "ray", "transformers"}
RUN_COMMANDS = """
import sys
from orchestrator.cli.main import main
for command, forbidden in {commands}.items():
    try:
        main(command.split(), prog_name="sweep")
    except SystemExit as end:
        assert not end.code, (command, end.code)
    assert not forbidden & set(sys.modules), (command, forbidden & set(sys.modules))
"""


def run_without_importing(commands: Mapping[str, set[str]], folder: Path) -> str:
    """Run commands in one process, check that none imported its modules, and return what is printed."""
    done = subprocess.run(
        [sys.executable, "-c", RUN_COMMANDS.format(commands=commands)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout
