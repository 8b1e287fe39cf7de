"""Errors of the system that reach the command line, each as one line with its remedy."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from orchestrator.cli.main import SweepGroup
from orchestrator.common.errors import EXIT_USER
from orchestrator.store.run import Run

LONG = "a" * 300
CONFIG = "grids: [{task: matmul, fixed: {device: cpu, matrix_size: 8}}]\n"


def result_of(error: Exception) -> Result:
    @click.command()
    def fail() -> None:
        raise error

    return CliRunner().invoke(SweepGroup(commands={"fail": fail}), ["fail"], prog_name="sweep")


@pytest.mark.parametrize(
    ("number", "filename", "line"),
    [
        (
            errno.ENAMETOOLONG,
            f"results/{LONG}",
            f"sweep: results/{LONG[:92]}…: cannot be used: File name too long. "
            "Give a shorter name\n",
        ),
        (
            errno.ELOOP,
            "results/x",
            "sweep: results/x: cannot be used: Too many levels of symbolic links. "
            "Remove the link that leads to itself\n",
        ),
        (
            errno.EMFILE,
            "results/x",
            "sweep: this process reached a limit: Too many open files. Raise it with `ulimit -n`\n",
        ),
        (errno.ENOENT, None, "sweep: the current folder was removed. Change to another one\n"),
    ],
)
def test_an_error_of_the_system_is_one_line(number: int, filename: str | None, line: str) -> None:
    result = result_of(OSError(number, os.strerror(number), filename))
    assert result.exit_code == EXIT_USER
    assert result.output == line


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "Cannot allocate memory. Free some memory, or raise it with `ulimit -v`"),
        (
            RuntimeError("can't start new thread"),
            "Resource temporarily unavailable. Raise it with `ulimit -u`, or end other processes",
        ),
        (
            ImportError("libx.so: failed to map segment from shared object"),
            "Cannot allocate memory. Free some memory, or raise it with `ulimit -v`",
        ),
        (
            ImportError("libx.so: cannot open shared object file: Too many open files"),
            "Too many open files. Raise it with `ulimit -n`",
        ),
        (OSError(errno.EFBIG, "File too large"), "File too large. Raise it with `ulimit -f`"),
    ],
    ids=str,
)
def test_a_limit_of_the_process_is_one_line(error: Exception, reason: str) -> None:
    result = result_of(error)
    assert result.exit_code == EXIT_USER
    assert result.output == f"sweep: this process reached a limit: {reason}\n"


@pytest.mark.parametrize("error", [OSError(errno.EINVAL, "odd"), ImportError("no name x")])
def test_an_error_without_a_file_that_is_no_limit_is_a_fault_of_the_program(
    error: Exception,
) -> None:
    assert result_of(error).exception is error


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "{}.yaml"),
        ("run", "{}.yaml", "--scheduler", "serial"),
        ("max-context", "{}.yaml"),
        ("plan", "c.yaml", "--out", "{}"),
        ("run", "c.yaml", "--out", "{}", "--scheduler", "serial"),
        ("run", "results.yaml", "--scheduler", "serial"),
        ("plan", "name.yaml"),
        ("status", "{}"),
        ("show", "{}", "ab"),
        ("report", "{}"),
        ("compare", "{}", "{}"),
        ("publish", "{}", "--out", "x"),
        ("import", "{}"),
    ],
)
@pytest.mark.parametrize("path", [LONG, "abcdefghi/" * 450 + "x"])
def test_a_path_that_is_too_long_is_one_line(
    words: tuple[str, ...], path: str, sweep_here: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(f"name: c\n{CONFIG}")
    (tmp_path / "results.yaml").write_text(f"name: c\nresults: {path}\n{CONFIG}")
    (tmp_path / "name.yaml").write_text(f"name: {path.replace('/', '')}\n{CONFIG}")
    result = sweep_here(*(word.format(path) for word in words))
    assert result.exit_code == EXIT_USER, result.output
    output = result.output.removeprefix("preparing: importing torch\n")
    assert output.startswith("sweep: ")
    assert output.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "c.yaml", "--out", "{}"),
        ("run", "c.yaml", "--out", "{}", "--scheduler", "serial"),
        ("status", "{}"),
        ("report", "{}", "{}"),
        ("publish", "run", "--out", "{}"),
    ],
)
@pytest.mark.parametrize("name", ["loop", "loop/x", "größe\udcff"])
@pytest.mark.xdist_group("every kind")
def test_a_link_to_itself_and_a_name_that_is_no_utf8_are_one_line(
    words: tuple[str, ...],
    name: str,
    sweep_here: Callable[..., Result],
    run_of_every_kind: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A publication is complete before its folder is replaced: 15 s of charts.
    monkeypatch.setattr("orchestrator.report.build.make_report", lambda *_: None)
    monkeypatch.setattr("orchestrator.report.build.report_files", lambda *_, **__: [])
    (tmp_path / "c.yaml").write_text(f"name: c\n{CONFIG}")
    (tmp_path / "run").symlink_to(run_of_every_kind.folder)
    (tmp_path / "loop").symlink_to("loop")
    result = sweep_here(*(word.format(name) for word in words))
    if words[0] == "plan" and "loop" in name:  # nothing is there yet, and nothing is written
        assert result.exit_code == 0, result.output
        return
    assert result.exit_code == EXIT_USER, result.output
    output = result.output.removeprefix("preparing: importing torch\n")
    assert output.startswith("sweep: ")
    assert output.count("\n") == 1
