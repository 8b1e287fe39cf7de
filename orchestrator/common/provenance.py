"""The version of this program: its git commit, and a digest of the code that can change a number."""

from __future__ import annotations

import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tasks.spec.source_digest import digest_of, python_files

PACKAGES = ("model", "tasks", "orchestrator")
SOURCE_ROOT = Path(__file__).resolve().parents[2]  # the folder that contains PACKAGES
PROGRAM_SOURCE = "program_source"  # the key in a row's facts and in run.json
# Prints the commit, other headers, and a line for each file that was edited or added.
_STATUS = (
    "git", "-C", str(SOURCE_ROOT),
    "status", "--porcelain=v2", "--branch", "--untracked-files=normal", "--",
)  # fmt: skip
_COMMIT = "# branch.oid "
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
    """Return the commit of this checkout, with "+" if files were edited or added; None without git."""
    try:
        # Git on a network file system may hang; the commit is not worth waiting longer.
        done = subprocess.run(
            [*_STATUS, *PACKAGES], capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.splitlines()
    headers = [line for line in lines if line.startswith("# ")]
    commit = headers[0].removeprefix(_COMMIT)
    if commit == "(initial)":  # a repository without a commit
        return None
    return f"{commit[:12]}+" if len(lines) > len(headers) else commit[:12]


def package_version(package: str) -> str:
    """Return the version of an installed package; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def describe_program(source: str | None, commit: str | None) -> str:
    """Return the parts of a program's version that are known, such as "SOURCE of commit COMMIT"."""
    return " of ".join(filter(None, (source, commit and f"commit {commit}")))
