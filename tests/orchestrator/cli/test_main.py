"""What is typed: options that cannot be are refused in one line, before anything is written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from orchestrator.cli.commands.options import FLAWS, STATUSES
from orchestrator.planning.invocation import QUALITY_FLAGS, UNMEASURED
from orchestrator.store.run import Run
from tasks.spec.status import Status
from tests.conftest import ROOT, after_preparing, sweep_command

CONFIG = "name: test\ngrids: [{task: train_step, fixed: {size: tiny, device: cpu}}]"
FEW = """
name: few
grids:
  - task: train_step
    fixed: {device: cpu, size: tiny, vocab_size: 50, batch_size: 1, warmup_steps: 1, measured_steps: 2, pass: forward}
    axes: {context_length: [8, 16, 24]}
"""
HUGE = "9" * 400


def test_statuses_and_flaws_of_the_command_line_are_those_of_the_program() -> None:
    """The command's own are written out, since the modules that have them take a while to import."""
    assert {*STATUSES} == {*Status, *UNMEASURED}
    assert [*FLAWS] == [*QUALITY_FLAGS]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        *(
            (("publish", "run", "--out", "new", "--limit-mb", size), "--limit-mb")
            for size in ("nan", "inf", "1e400", "-1", "x")
        ),
        *(
            (("plan", "c.yaml", "--sample", share), "--sample")
            for share in ("nan%", "inf%", "-1%", "0%", "0.0%", HUGE + "%")
        ),
        *(
            (("run", "c.yaml", "--time-limit", limit), "--time-limit")
            for limit in ("nan", "inf", "-1", "9", "1e3", HUGE + "h", "9" * 11)
        ),
    ],
)
def test_an_invalid_number_on_the_command_line_is_refused_in_one_line(
    words: tuple[str, ...], expected: str, sweep_here: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    ended = sweep_here(*words)
    assert (ended.exit_code, after_preparing(ended)) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"sweep: {expected} ")
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


@pytest.mark.parametrize(("size", "is_noted"), [("24GB", True), ("24g", True), ("24GiB", False)])
def test_a_memory_in_another_unit_is_noted_as_it_is_understood(
    size: str, is_noted: bool, sweep_here: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    ended = sweep_here("plan", "c.yaml", "--gpu", size)
    assert ended.exit_code == 0
    note = f"sweep: --gpu {size}: understood as a GPU of 24 GiB\n"
    assert ended.stderr == (note if is_noted else "")


@pytest.mark.parametrize("name", ["cc.yml", "cc", "c_c.yaml"])
def test_a_config_with_another_ending_or_a_slip_is_suggested(
    name: str, sweep_here: Callable[..., Result], tmp_path: Path
) -> None:
    for other in ("cc", "demo", "full"):
        (tmp_path / f"{other}.yaml").write_text(CONFIG)
    error = f"sweep: {name}: cannot be read: No such file or directory. Did you mean 'cc.yaml'?\n"
    assert sweep_here("plan", name).stderr == error


@pytest.mark.parametrize(
    "words",
    [
        ("run", "c.yaml", "--scheduler", "serial", "--out"),
        ("publish", ROOT / "results" / "published" / "h200" / "tenth", "--out"),
    ],
)
def test_a_folder_that_cannot_be_created_is_not_one_that_was_removed(
    words: tuple[object, ...], sweep_here: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    ended = sweep_here(*words, "/proc/x")
    assert ended.exit_code == 2
    assert "sweep: /proc/x: cannot be written: " in ended.stderr
    assert ended.stderr.endswith("Name a writable folder with --out\n")


def test_an_exclude_of_a_config_that_matches_no_cell_is_refused_in_one_line(
    sweep_here: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(
        "name: a\ngrids:\n- task: matmul\n  fixed: {device: cpu}\n  exclude: [{device: mps}]\n"
    )
    for command in ("plan", "run"):
        ended = sweep_here(command, "c.yaml")
        assert (ended.exit_code, after_preparing(ended)) == (2, "")
        assert (
            ended.stderr
            == "sweep: c.yaml:5: grids[0].exclude[0]: matches no cell of the grid. Correct it, or leave it out\n"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            ["kernel_tim"],
            "--instrument: unknown instrument 'kernel_tim'. Did you mean 'kernel_time'?",
        ),
        (
            ["kernels", "nsys"],
            "--instrument: instruments: nsys cannot go with timing or kernels or backend",
        ),
    ],
)
def test_an_invalid_choice_of_instruments_is_refused_before_a_run(
    names: list[str], expected: str, sweep_here: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    ended = sweep_here(
        "run", "c.yaml", *(word for name in names for word in ("--instrument", name))
    )
    assert (ended.exit_code, after_preparing(ended)) == (2, "")
    assert ended.stderr.startswith(f"sweep: {expected}")
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("--retry", "failed", "--only", "ok"),
            "--retry failed: --only excludes all such cells. Add --only failed, or leave",
        ),
        (
            ("--retry", "interval-wide", "--only", "oom"),
            "--retry interval-wide: --only excludes all such cells. Add --only ok, or leave",
        ),
        (
            ("--scheduler", "serial", "--address", "auto"),
            "--address: needs Ray, and --scheduler serial measures in this process.",
        ),
        (
            ("--scheduler", "serial", "--cpu-cells", "2"),
            "--cpu-cells: needs Ray, and --scheduler serial measures in this process.",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused_in_one_line(
    words: tuple[str, ...], expected: str, sweep_here: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    ended = sweep_here("run", "c.yaml", *words)
    assert (ended.exit_code, after_preparing(ended)) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"sweep: {expected}")
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


@pytest.mark.parametrize(
    "words",
    [
        ("--retry", "interval-wide", "--only", "ok"),
        ("--retry", "oom", "--only", "oom", "--only", "ok"),
    ],
)
def test_options_that_do_not_contradict_each_other_are_accepted(
    words: tuple[str, ...], sweep_here: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    assert sweep_here("plan", "c.yaml", *words).exit_code == 0


@pytest.mark.parametrize("option", ["--granularity", "--up-to"])
def test_no_size_is_sought_that_no_parameter_can_have(
    option: str, sweep_here: Callable[..., Result]
) -> None:
    ended = sweep_here(
        "max-context", "c.yaml", "--gpu", "H200", "--up-to", 2**63 - 1, option, 2**63
    )
    assert ended.exit_code == 2
    assert f"Invalid value for '{option}'" in ended.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("run", "c.yaml", "--out", ""),
        ("run", "c.yaml", "--scheduler", "serial", "--out", " "),
        ("plan", "c.yaml", "--out", ""),
        ("max-context", "c.yaml", "--out", "", "--gpu", "H200"),
        ("max-batch", "c.yaml", "--out=", "--gpu", "H200"),
        ("publish", "run", "--out", ""),
        ("import", "a.sqlite", "--out", ""),
        ("doctor", "--out", ""),
        ("status", ""),
        ("show", "", "3f2a"),
        ("report", "run", ""),
        ("compare", "run", ""),
        ("compare", "run:3f2a", ":3f2a"),
    ],
)
def test_an_empty_name_of_a_folder_is_refused(
    words: tuple[str, ...], sweep_here: Callable[..., Result], tmp_path: Path
) -> None:
    """As of `--out "$UNSET"`: not the one that the user is in."""
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "run").mkdir()
    ended = sweep_here(*words)
    assert (ended.exit_code, after_preparing(ended)) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert "names no folder" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.yaml", "run"]


def test_a_publication_is_not_written_into_a_folder_named_like_an_address(
    sweep_here: Callable[..., Result], tmp_path: Path
) -> None:
    ended = sweep_here("publish", "run", "--out", "s3://bucket/x")
    assert ended.exit_code == 2
    assert ended.stderr == (
        "sweep: --out s3://bucket/x: is an address. Name a folder, and copy it there afterwards\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["demo", "results/demo", "results/demo:3f2a"])
def test_a_run_to_compare_that_is_not_there_is_called_as_it_was_typed(
    name: str, sweep_here: Callable[..., Result]
) -> None:
    ended = sweep_here("compare", name, name)
    assert ended.exit_code == 2
    assert ended.stderr.startswith(f"sweep: {name.split(':')[0]}: holds no run")


def test_a_run_to_compare_may_be_named_without_results(
    sweep_here: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "results" / "demo").mkdir(parents=True)
    assert sweep_here("compare", "demo", "demo").stderr.startswith(
        "sweep: results/demo: holds no run"
    )


def test_a_run_to_compare_may_have_a_colon_in_its_name(
    sweep_here: Callable[..., Result], tmp_path: Path
) -> None:
    for folder in ("s3:x", "results/a:b"):
        (tmp_path / folder).mkdir(parents=True)
    for name, folder in (
        ("s3:x", "s3:x"),
        ("s3:x:3f2a", "s3:x"),
        ("a:b", "results/a:b"),
        ("a:b:3f2a", "results/a:b"),
    ):
        assert sweep_here("compare", name, name).stderr.startswith(f"sweep: {folder}: holds no run")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a file that is always full")
def test_output_that_cannot_be_written_is_reported_in_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            sweep_command("plan", ROOT / "configs" / "demo.yaml"), stdout=full, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60,
        )  # fmt: skip
    expected = "sweep: its output cannot be written: No space left on device. Free some space and run again\n"
    assert (done.returncode, done.stderr) == (2, expected)


@pytest.mark.process
@pytest.mark.parametrize("deaf", [False, True], ids=["its errors are read", "nor are its errors"])
def test_a_sweep_continues_when_nobody_reads_its_output(
    deaf: bool, write_config: Callable[..., Path]
) -> None:
    """As after `| head -1`, or where a `tee` was killed at night."""
    config = write_config(FEW)
    command = sweep_command("run", config.name, "--out", "run", "--scheduler", "serial")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    errors = subprocess.STDOUT if deaf else subprocess.PIPE
    with subprocess.Popen(
        command,
        cwd=config.parent,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=environment,
    ) as sweep:
        assert sweep.stdout
        assert sweep.stdout.readline()
        sweep.stdout.close()
        errors_seen = sweep.stderr.read() if sweep.stderr else ""
    assert sweep.returncode == 0
    assert errors_seen.count("the output is closed") == (not deaf)
    assert [
        status for (status,) in Run(config.parent / "run").rows("attempts", ["status"])
    ] == 3 * ["ok"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run"], "sweep run: Missing argument 'CONFIG'. See `sweep run --help`"),
        (
            ["plan", "c.yaml", "--nonsense"],
            "sweep plan: No such option '--nonsense'. See `sweep plan --help`",
        ),
        (["runn"], "sweep: No such command 'runn'. Did you mean 'run'? See `sweep --help`"),
        (
            ["report", "x", "--format", "doc"],
            "sweep report: Invalid value for '--format': 'doc' is not one of ",
        ),
    ],
)
def test_an_invalid_command_is_refused_in_one_line(
    words: list[str], expected: str, sweep_here: Callable[..., Result]
) -> None:
    done = sweep_here(*words)
    assert done.exit_code == 2
    assert done.stderr.startswith(expected)
    assert done.stderr.count("\n") == 1


def heed_ctrl_c() -> None:
    """What a shell has begun in the background does not, and hands that down."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_outside_of_a_sweep_is_told_from_cells_that_failed(tmp_path: Path) -> None:
    """While it still reads the config: exit code 1 would say that cells failed."""
    os.mkfifo(tmp_path / "c.yaml")
    command = [sys.executable, "-m", "orchestrator", "run", "c.yaml"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        preexec_fn=heed_ctrl_c,
    ) as sweep:  # fmt: skip
        config = (tmp_path / "c.yaml").open("w")  # waits for a reader
        sweep.send_signal(signal.SIGINT)
        config.close()  # a signal just before it reads does not end its reading
        out, err = sweep.communicate(timeout=60)
    assert (sweep.returncode, err) == (130, "sweep: stopped by SIGINT\n")
    assert out in ("", "preparing: importing torch, starting Ray\n")


def test_ctrl_c_during_imports_prints_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt")
    done = subprocess.run(
        sweep_command("--help"),
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
