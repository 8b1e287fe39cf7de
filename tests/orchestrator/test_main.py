"""The command line as its own process, in an environment that some schedulers make."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator import __main__ as entry
from orchestrator.__main__ import _require_usable_modes
from tests.conftest import ROOT

CONFIG = """
name: c
grids: [{task: train_step, fixed: {device: cpu, size: tiny, context_length: 16, batch_size: 1}}]
"""


@pytest.mark.process
def test_the_locale_does_not_decide_which_paths_can_be_used(tmp_path: Path) -> None:
    folder = tmp_path / "größe"
    folder.mkdir()
    config, run = folder / "été.yaml", folder / "results"
    config.write_text(CONFIG)
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment = {**os.environ, **locale, "PYTHONPATH": str(ROOT)}
    for words in (
        ["plan", config],
        ["run", config, "--out", run, "--scheduler", "serial"],
        ["status", run],
        ["report", run],
        ["compare", run, run],
    ):
        command = [sys.executable, "-m", "orchestrator", *map(str, words)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
        assert done.returncode == 0, (words, done.stderr.decode())
        for line in done.stderr.decode().splitlines():
            assert line.startswith("as one page: "), (words, line)


def flags_of(optimize: int = 0, inspect: int = 0) -> SimpleNamespace:
    return SimpleNamespace(utf8_mode=1, warn_default_encoding=0, optimize=optimize, inspect=inspect)


def test_a_process_without_docstrings_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, words: started.append(words))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-OO", "-m", "orchestrator", "report", "r"])
    monkeypatch.delenv("PYTHONOPTIMIZE", raising=False)
    for level in (0, 1, 2, 2):  # the last one is still without, and is not started again and again
        monkeypatch.setattr(sys, "flags", flags_of(optimize=level))
        _require_usable_modes()
    assert started == [["python", "-m", "orchestrator", "report", "r"]]
    assert os.environ["PYTHONOPTIMIZE"] == "1"


def test_a_process_that_would_wait_for_input_at_its_end_starts_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, words: started.append(words))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "orchestrator", "report", "r"])
    monkeypatch.setenv("PYTHONINSPECT", "1")
    monkeypatch.setattr(sys, "flags", flags_of(inspect=1))
    _require_usable_modes()
    assert "PYTHONINSPECT" not in os.environ
    _require_usable_modes()  # `python -i`, as somebody wants it
    assert started == [sys.orig_argv]


def test_a_limit_while_the_program_is_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "click")

    monkeypatch.setattr(entry, "_require_usable_modes", fail)
    with pytest.raises(SystemExit) as end:
        entry.main()
    assert end.value.code == 2
    reason = "Too many open files. Raise it with `ulimit -n`"
    assert capsys.readouterr().err == f"sweep: this process reached a limit: {reason}\n"


@pytest.mark.process
@pytest.mark.parametrize("closed", ["0", "1", "2", "01", "02", "12", "012"])
def test_closed_standard_descriptors_are_opened_first(closed: str, tmp_path: Path) -> None:
    """A file that is opened later must not get the number of one of them."""
    (tmp_path / "c.yaml").write_text(CONFIG)
    words = [sys.executable, "-m", "orchestrator", "run", "c.yaml", "--scheduler", "serial"]
    redirections = " ".join(f"{number}>&-" for number in closed)
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirections}', "sh", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "results" / "c" / "attempts").glob("*.parquet"))) == 1
    assert ("1" in closed) == (not done.stdout)
    assert not done.stderr
