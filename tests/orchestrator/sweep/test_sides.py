"""The sides of `sweep ab`: their texts, their Pythons, and commits as worktrees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.common.errors import ConfigError, SweepError
from orchestrator.common.provenance import SOURCE_ROOT
from orchestrator.sweep import sides
from orchestrator.sweep.sides import Side, parse_side, prepare, prepare_sides, remove_worktrees

FACTS = {"root": str(SOURCE_ROOT), "torch": "2.13.0", "python": "3.11.7"}


@pytest.mark.parametrize(
    ("text", "side"),
    [
        ("python=.venv/bin/python", Side(python=".venv/bin/python")),
        ("commit=HEAD~1", Side(commit="HEAD~1")),
        ("env=A=1", Side(env={"A": "1"})),
        ("env=A=", Side(env={"A": ""})),
        ("env=A=x=y", Side(env={"A": "x=y"})),
        ("env=CUDA_VISIBLE_DEVICES=0,1,env=B=2", Side(env={"CUDA_VISIBLE_DEVICES": "0,1", "B": "2"})),
        ("commit=main,python=p,env=A=1", Side("p", "main", {"A": "1"})),
    ],
)  # fmt: skip
def test_a_side_is_parsed(text: str, side: Side) -> None:
    assert parse_side(text, "--a") == side


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--a : is not a side"),
        ("main", "--a main: is not a side"),
        ("comit=main", "--a comit=main: is not a side"),
        ("python=", "--a python=: is not a side"),
        ("env=A", "--a env=A: is not a variable"),
        ("env==1", "--a env==1: is not a variable"),
        ("commit=a,commit=b", "--a: names commit twice"),
        ("env=A=1,env=A=2", "--a: names A twice"),
    ],
)
def test_a_text_that_is_no_side_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_side(text, "--a")
    assert caught.value.message == message
    assert caught.value.remedy


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    done = subprocess.run(
        ["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose model has three states: in two commits, and edited."""
    root = tmp_path / "mine"
    (root / "configs").mkdir(parents=True)
    git(root, "init", "--quiet")
    for number in (1, 2, 3):
        (root / "model.py").write_text(f"state = {number}\n")
        if number == 1:
            (root / "configs" / "mine.yaml").write_text("name: mine\n")
        if number < 3:
            git(root, "add", ".")
            git(root, "commit", "--quiet", "--message", str(number))
    monkeypatch.setattr(sides, "_probe", lambda *_: FACTS)
    monkeypatch.chdir(root)
    return root


def test_a_commit_is_checked_out_and_the_edited_files_are_left_alone(repository: Path) -> None:
    config, trees = Path("configs/mine.yaml"), repository.parent / "trees"
    program = prepare(Side(commit="HEAD~1"), config, trees, "--a")
    assert program.side.commit == git(repository, "rev-parse", "HEAD~1")
    assert program.folder == trees / program.side.commit[:12]
    assert program.config == program.folder / "configs" / "mine.yaml"
    assert (program.folder / "model.py").read_text() == "state = 1\n"
    assert (repository / "model.py").read_text() == "state = 3\n"
    # A `model.py` of the user must not be imported instead of the package `model`.
    assert program.env["PYTHONPATH"].split(":")[:2] == [str(SOURCE_ROOT), str(program.folder)]
    remove_worktrees(config, trees)
    assert not trees.exists()
    assert "trees" not in git(repository, "worktree", "list")


@pytest.mark.parametrize("damage", ["edited", "half-made"])
def test_a_worktree_that_a_killed_command_left_is_made_whole(repository: Path, damage: str) -> None:
    config, trees = Path("configs/mine.yaml"), repository.parent / "trees"
    folder = prepare(Side(commit="HEAD"), config, trees, "--a").folder
    if damage == "edited":
        (folder / "model.py").unlink()
    else:
        (folder / ".git").write_text("gitdir: /nowhere\n")
    again = prepare(Side(commit="HEAD"), config, trees, "--a")
    assert (again.folder / "model.py").read_text() == "state = 2\n"


def test_a_side_that_fails_leaves_no_commit_checked_out(repository: Path) -> None:
    config, trees = Path("configs/mine.yaml"), repository.parent / "trees"
    with pytest.raises(SweepError, match="is not known"):
        prepare_sides({"a": Side(commit="HEAD"), "b": Side(commit="nonesuch")}, config, trees)
    assert not trees.exists()
    assert "trees" not in git(repository, "worktree", "list")


def test_a_config_that_is_a_link_out_of_the_repository_is_that_of_the_commit(
    repository: Path,
) -> None:
    outside, config = repository.parent / "mine.yaml", Path("configs/link.yaml")
    outside.write_text("name: mine\n")
    config.symlink_to(outside)
    git(repository, "add", str(config))
    git(repository, "commit", "--quiet", "--message", "link")
    program = prepare(Side(commit="HEAD"), config, repository.parent / "trees", "--a")
    assert program.config == program.folder / config


def test_a_side_that_breaks_off_leaves_no_commit_checked_out(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def probe(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sides, "_probe", probe)
    trees = repository.parent / "trees"
    with pytest.raises(KeyboardInterrupt):
        prepare_sides({"a": Side(commit="HEAD")}, Path("configs/mine.yaml"), trees)
    assert not trees.exists()


def test_a_side_without_a_commit_measures_here(repository: Path) -> None:
    config = Path("configs/mine.yaml")
    program = prepare(Side(env={"A": "1"}), config, repository / "trees", "--a")
    assert (program.python, program.folder, program.config) == (sys.executable, repository, config)
    assert program.env["A"] == "1"
    assert not (repository / "trees").exists()


@pytest.mark.parametrize(
    ("side", "message"),
    [
        (Side(commit="nowhere"), "--b commit=nowhere: is not known in this repository"),
        (Side(commit="HEAD"), "--b: commit {head} has no configs/new.yaml"),
        (Side(python="./none"), "--b python=./none: is no program"),
    ],
)
def test_a_side_that_cannot_measure_is_refused(repository: Path, side: Side, message: str) -> None:
    Path("configs/new.yaml").touch()
    with pytest.raises(ConfigError) as caught:
        prepare(side, Path("configs/new.yaml"), repository / "trees", "--b")
    assert caught.value.message == message.format(head=git(repository, "rev-parse", "HEAD")[:12])
    assert caught.value.remedy


def test_a_config_outside_a_repository_has_no_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="needs a git repository that contains"):
        prepare(Side(commit="HEAD"), Path("x.yaml"), tmp_path / "trees", "--a")


@pytest.mark.process
def test_a_python_without_this_program_is_refused(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift; PYTHONPATH= exec {sys.executable} -S -P "$@"\n')
    python.chmod(0o755)
    with pytest.raises(SweepError, match="cannot import transformer-sweep: ModuleNotFoundError"):
        prepare(Side(python=str(python)), Path("x.yaml"), tmp_path / "trees", "--a")


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1, "b": 2}', '{"a": {}}'])
def test_a_file_of_no_comparison_names_no_command(tmp_path: Path, content: str) -> None:
    (tmp_path / sides.SIDES_FILE).write_text(content)
    assert sides.origin_of(tmp_path / "a", tmp_path / "b") is None
