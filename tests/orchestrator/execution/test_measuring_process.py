"""Which program this is: told by its files, whatever commit they are in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.execution.attempt import child_environment
from orchestrator.execution.measuring_process import HERE, PACKAGES, PROGRAM, named, program_source
from tasks.spec.attempt import Attempt

TOLD = "from orchestrator.execution.measuring_process import git_commit, program_source; print(program_source(), git_commit())"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for package in PACKAGES:
        shutil.copytree(
            HERE / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    return tmp_path


def told_by(copy: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", TOLD],
        cwd=copy,
        env={"PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
    )
    return done.stdout.split()[0] if done.returncode == 0 else done.stderr


def test_it_is_the_same_wherever_it_lies(copy: Path) -> None:
    assert told_by(copy) == program_source()


@pytest.mark.parametrize(
    ("file", "is_another"),
    [
        ("tasks/train_step.py", True),
        ("model/transformer.py", True),
        ("orchestrator/execution/child_process.py", True),
        ("orchestrator/report/tables/registry.py", False),
    ],
)
def test_it_is_another_where_what_measures_was_changed(
    copy: Path, file: str, is_another: bool
) -> None:
    (copy / file).write_text((copy / file).read_text() + "\n# changed\n")
    assert (told_by(copy) != program_source()) == is_another


def test_it_is_another_where_a_file_was_renamed(copy: Path) -> None:
    (copy / "model" / "another.py").write_text((copy / "model" / "__init__.py").read_text())
    assert told_by(copy) != program_source()


def test_what_an_editor_keeps_beside_it_is_not_of_it(copy: Path) -> None:
    (copy / "tasks" / ".ipynb_checkpoints").mkdir()
    (copy / "tasks" / ".ipynb_checkpoints" / "train_step-checkpoint.py").write_text("an older one")
    (copy / "orchestrator" / ".#run.py").symlink_to("user@host.1234")
    assert told_by(copy) == program_source()


def test_what_is_not_known_of_it_is_left_out() -> None:
    assert named("a1", "b2+") == "a1 of commit b2+"
    assert (named("a1", None), named(None, "b2"), named(None, None)) == ("a1", "commit b2", "")


@pytest.fixture
def strangers(tmp_path: Path) -> Path:
    """A folder with packages of somebody else that are called like ours."""
    for package in ("model", "tasks"):
        (tmp_path / "others" / package).mkdir(parents=True)
        (tmp_path / "others" / package / "__init__.py").write_text(
            "raise SystemExit(f'{__name__} is of a stranger')"
        )
    return tmp_path / "others"


@pytest.mark.process
@pytest.mark.parametrize(
    "words",
    [
        ("-m", "orchestrator", "plan", str(HERE / "configs/demo.yaml")),
        ("-c", "import orchestrator.execution.supervisor"),
    ],
)
@pytest.mark.parametrize("in_it", [True, False])
def test_packages_of_the_same_name_are_not_taken_for_ours(
    strangers: Path, words: tuple[str, ...], in_it: bool
) -> None:
    """Where a driver begins, or a worker of Ray's, which looks first where its driver was started."""
    folder, paths = (strangers, [HERE]) if in_it else (strangers.parent, [strangers, HERE])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.process
def test_a_config_leads_no_process_to_another_program(
    make_attempt: Callable[..., Attempt], strangers: Path
) -> None:
    attempt = make_attempt(settings={"env": {"PYTHONPATH": str(strangers)}})
    environment = {**os.environ, **child_environment(attempt)}
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(HERE), str(strangers)]
    done = subprocess.run(
        [*PROGRAM, "--help"], cwd=strangers, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
