"""The version of this program: its git commit, and a digest of the code that can change a number."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tasks.spec.source_digest import digest_of, python_files

PACKAGES = ("model", "tasks", "orchestrator")
SOURCE_ROOT = Path(__file__).resolve().parents[2]  # the folder that contains PACKAGES
PROGRAM_SOURCE = "program_source"  # the key in a row's facts and in run.json
# These packages read stored results or parse the command line. Their code cannot change a number
# that is measured, so an edit there does not make earlier results incomparable.
_WITHOUT_EFFECT = ("orchestrator/report/", "orchestrator/analysis/", "orchestrator/cli/")


def program_source() -> str:
    """Return a digest of the Python files that can change a measurement, as they are now.

    Two commits with equal digests measure the same way.
    """
    digested = []
    for package in PACKAGES:
        for file in python_files(SOURCE_ROOT / package):
            name = file.relative_to(SOURCE_ROOT).as_posix()
            if not name.startswith(_WITHOUT_EFFECT):
                digested.append((f"{name}\n", file))
    return digest_of(digested)


def git_commit() -> str | None:
    """Return the commit of this checkout, with "+" if files were edited; None without git."""
    try:
        changes = _git("status", "--porcelain", "--untracked-files=no", "--", *PACKAGES)
        commit = _git("rev-parse", "--short=12", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}+" if changes else commit


def describe_program(source: str | None, commit: str | None) -> str:
    """Return the parts of a program's version that are known, such as "SOURCE of commit COMMIT"."""
    return " of ".join(filter(None, (source, commit and f"commit {commit}")))


def _git(*words: str) -> str:
    command = ["git", "-C", str(SOURCE_ROOT), *words]
    # Git on a network file system may hang; the commit is not worth waiting longer.
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
