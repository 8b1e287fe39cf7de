"""Links, pipes and devices in a results folder are neither followed nor waited for."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result

from orchestrator.common.errors import RunError, RunUnwritable
from orchestrator.store.artifacts import read_artifacts
from orchestrator.store.open import open_for_writing, open_run
from orchestrator.store.run import Run
from orchestrator.store.run_collection import Publication
from orchestrator.store.untrusted_files import is_plain
from orchestrator.sweep.outcome_log import recover_attempts
from tasks.process.journal import read_journal
from tasks.spec.attempt import ATTEMPT_FILE, JOURNAL_FILE, LOG_FILE, Attempt, read_attempt
from tests.conftest import ROOT
from tests.support.fake_sweep import journalled

PUBLISHED = ROOT / "results" / "published" / "h200"


def link(path: Path) -> None:
    path.symlink_to(path.parent.parent)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "artifacts" / "abc" / "1").mkdir(parents=True)
    (folder / "samples").mkdir()
    (folder / "run.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    "name",
    [
        ".lock", "run.json", "report", "report/charts", "samples", "samples/a-1.parquet",
        "stored.json", "0001.log", "damaged", "samples/0001.parquet",
        "artifacts/xyz", "cache", "cache/inductor",
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("create", "kind"), [(link, "a symbolic link"), (os.mkfifo, "a named pipe")]
)
def test_a_run_with_a_link_or_a_pipe_is_refused(
    name: str, create: Callable[[Path], None], kind: str, run: Path
) -> None:
    path = run / name
    path.parent.mkdir(exist_ok=True)
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    create(path)
    with pytest.raises(RunError, match=rf"{name}: is {kind}\. Remove it"):
        open_run(run)


def test_no_link_is_to_be_removed_from_a_folder_without_a_run(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path.parent)
    with pytest.raises(RunError, match=r"holds no run, and .*link: is a symbolic link") as refused:
        open_run(tmp_path)
    assert "Remove it" not in str(refused.value)
    assert str(refused.value).endswith(". Name the folder of a run, or a new one")


def test_the_run_itself_may_be_a_link(run: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run)
    assert open_run(tmp_path / "link").exists


def test_a_pipe_in_place_of_a_run_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run")
    with pytest.raises(RunError, match="is a file"):
        open_run(tmp_path / "run")


@pytest.mark.parametrize("create", [link, os.mkfifo])
def test_a_log_that_is_a_link_or_a_pipe_is_not_read(
    create: Callable[[Path], None], run: Path
) -> None:
    attempt = run / "artifacts" / "abc" / "1"
    create(attempt / "log.txt")
    (attempt / "rerun.sh").write_text("python -m tasks\n")
    found = read_artifacts(Run(run), "abc", 1)
    assert (found.log, found.rerun_command) == (
        ("(a link or a pipe: not read)",),
        "python -m tasks",
    )


def test_the_command_by_hand_follows_a_run_that_was_moved(run: Path, tmp_path: Path) -> None:
    attempt = run / "artifacts" / "abc" / "1"
    cache = f"TORCHINDUCTOR_CACHE_DIR={run}/cache"
    command = f"env {cache} python -m tasks {attempt}/attempt.json"
    (attempt / "rerun.sh").write_text(f"{command}\n")
    assert read_artifacts(Run(run), "abc", 1).rerun_command == command
    moved = tmp_path / "elsewhere"
    shutil.move(run, moved)
    found = read_artifacts(Run(moved), "abc", 1).rerun_command
    assert found == command.replace(str(run), str(moved))


def test_a_file_below_a_link_is_not_plain(run: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (run / "artifacts" / "abc" / "2").symlink_to(tmp_path)
    assert (run / "artifacts" / "abc" / "2" / "secret").is_file()
    assert not is_plain(run / "artifacts" / "abc" / "2" / "secret", run)


def test_a_report_is_not_written_through_a_link(run: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (run / "report" / "all").mkdir(parents=True)
    (run / "report" / "all" / "charts").symlink_to(outside)
    with pytest.raises(RunUnwritable, match=r"report/all/charts: is a symbolic link\. Remove it"):
        Run(run).write_report([("all/charts/lines.svg", "<svg/>")])
    assert list(outside.iterdir()) == []


def test_a_link_in_a_publication_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "published"
    shutil.copytree(PUBLISHED / "tenth", folder / "tenth")
    (tmp_path / "cells.parquet").write_bytes((PUBLISHED / "cells.parquet").read_bytes())
    (folder / "cells.parquet").symlink_to(tmp_path / "cells.parquet")
    (folder / "publication.json").write_text('{"runs": ["tenth"], "files": {}}')
    with pytest.raises(RunError, match=r"cells\.parquet: is a symbolic link"):
        Publication(folder)


def test_a_lock_that_is_a_link_leaves_its_target_alone(
    run: Path, tmp_path: Path, write_config: Callable[..., Path], sweep_here: Callable[..., Result]
) -> None:
    target = tmp_path / "precious"
    target.write_text("precious")
    (run / ".lock").symlink_to(target)
    done = sweep_here("run", write_config("name: x\ngrids: [{task: matmul}]\n"), "--out", run)
    assert done.exit_code == 2
    assert target.read_text() == "precious"


def test_a_part_that_is_named_as_a_folder_is_refused(run: Path) -> None:
    (run / "samples" / "x-...parquet").write_bytes(b"")
    assert not [cell for cell in Run(run).highest_attempts() if "x" in cell]
    with pytest.raises(RunError, match="is not the name of a part"):
        Run(run).read("samples")


@pytest.mark.parametrize("cell", ["..", "../..", "/etc", "a/b", ""])
def test_a_cell_whose_id_is_a_path_has_no_folder(cell: str, run: Path) -> None:
    with pytest.raises(RunError, match="which is a path"):
        read_artifacts(Run(run), cell, 1)


@pytest.fixture
def adoptable(run: Path, make_attempt: Callable[..., Attempt]) -> Attempt:
    """An attempt that finished after its driver was killed, with a long log."""
    cell = make_attempt().cell
    attempt = replace(make_attempt(), folder=str(run / "artifacts" / cell.id / "1"))
    journalled(attempt)
    (attempt.path / LOG_FILE).touch()
    os.truncate(attempt.path / LOG_FILE, 10**8)  # without blocks
    return attempt


@pytest.mark.parametrize("create", ["link", "pipe"])
@pytest.mark.parametrize("name", ["attempt.json", "journal.jsonl", "log.txt", "."])
def test_an_attempt_with_a_link_or_a_pipe_is_not_adopted(
    name: str, create: str, adoptable: Attempt, tmp_path: Path
) -> None:
    file, outside = adoptable.path / name, tmp_path / "outside"
    file.rename(outside)
    if create == "link":
        file.symlink_to(outside)
    else:
        os.mkfifo(file)
    before = outside.stat().st_size
    with open_for_writing(Run(adoptable.path.parents[2])) as writer:
        if (name, create) == (".", "pipe"):
            assert recover_attempts(writer) == 0
        else:
            with pytest.raises(RunError, match=r"is a (symbolic link|named pipe)\. Remove it"):
                recover_attempts(writer)
    assert outside.stat().st_size == before


def rewrite(file: Path, **values: object) -> None:
    """Write an attempt file with other values, as somebody who knows the checksum would."""
    stored = {**json.loads(file.read_text()), **values}
    del stored["checksum"]
    file.write_text(json.dumps(stored))


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "5",
        "null",
        "[" * 100_000,
        '{"task": [], "params": {}, "settings": {}}',
        '{"task": "accumulation", "params": [], "settings": {}}',
        '{"task": "accumulation", "params": {}, "settings": []}',
    ],
)
def test_an_attempt_file_of_another_kind_is_not_adopted(content: str, adoptable: Attempt) -> None:
    (adoptable.path / ATTEMPT_FILE).write_text(content)
    with open_for_writing(Run(adoptable.path.parents[2])) as writer:
        assert recover_attempts(writer) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeout_s", "soon"),
        ("timeout_s", [1]),
        ("env", [1]),
        ("env", {"A": 1}),
        ("instruments", "all"),
        ("cores", ["first"]),
        ("host_memory_gib", "2"),
        ("start_method", "guess"),
    ],
)
def test_settings_of_another_type_are_not_adopted(
    name: str, value: object, adoptable: Attempt
) -> None:
    file = adoptable.path / ATTEMPT_FILE
    rewrite(file, settings={**json.loads(file.read_text())["settings"], name: value})
    with open_for_writing(Run(adoptable.path.parents[2])) as writer:
        assert recover_attempts(writer) == 0


SAMPLE = {"instrument": "timing", "metric": "m", "unit": "ms", "value": 1.0}


@pytest.mark.parametrize(
    "entry",
    [
        {"samples": [{**SAMPLE, "value": "fast"}]},
        {"samples": [{**SAMPLE, "value": 10**400}]},
        {"samples": [{**SAMPLE, "value": True}]},
        {"samples": [{**SAMPLE, "step": 2**40}]},
        {"samples": [{**SAMPLE, "note": 5}]},
        {"samples": [{**SAMPLE, "note": "\ud800"}]},
        {"samples": [{**SAMPLE, "note": ["x"]}]},
        {"samples": {"instrument": "timing"}},
        {"facts": [["a", "b"]]},
        {"evidence": [["a", "b"]]},
        {"stage": ["x"]},
        {"time": 1e300},
        {"time": "soon"},
        {"after_s": float("inf")},
        {"status": ["ok"]},
    ],
    ids=str,
)
def test_a_journal_with_values_of_other_types_is_not_adopted(
    entry: dict[str, object], adoptable: Attempt
) -> None:
    lines = [{"time": 1.0, "samples": [SAMPLE]}, {"time": 2.0, "status": "ok", "evidence": {}}]
    journal = adoptable.path / JOURNAL_FILE
    for has_fault in (False, True):
        written = [{**line, **entry} if has_fault else line for line in lines]
        journal.write_text("".join(f"{json.dumps(line)}\n" for line in written))
        assert (read_journal(journal).final is None) == has_fault
    with open_for_writing(Run(adoptable.path.parents[2])) as writer:
        assert recover_attempts(writer) == 0


def test_an_adopted_attempt_has_the_number_of_its_folder(adoptable: Attempt) -> None:
    file = adoptable.path / ATTEMPT_FILE
    rewrite(file, number="/../../../outside")
    assert read_attempt(file.read_text()).number == "/../../../outside"
    run = Run(adoptable.path.parents[2])
    with open_for_writing(run) as writer:
        assert recover_attempts(writer) == 1
    assert list(run.read("attempts")["attempt"]) == [1]
