"""A damaged or foreign run.json is reported in one line with the remedy by every command."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from orchestrator.cli.main import main
from orchestrator.common.errors import RunError, RunMismatch
from orchestrator.planning.request import SweepRequest
from orchestrator.store.manifest import require_sweep
from orchestrator.store.run import Run
from tests.conftest import after_preparing
from tests.orchestrator.sweep.test_pipeline import request_of
from tests.support.fake_sweep import FakeScheduler, go, outcome_of

__all__ = ["request_of"]
WRONG = (None, 3, "x", [3], {"a": 3})


@pytest.fixture
def file(request_of: Callable[..., SweepRequest], make_once: Callable[..., None]) -> Path:
    """Return the run.json of a run that a sweep wrote."""
    request = request_of()
    make_once(request.run.folder, lambda: go(request, FakeScheduler(outcome_of)))
    return request.run.folder / "run.json"


def sweep(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], prog_name="sweep")


def read_checked(file: Path) -> dict[str, Any]:
    found = Run(file.parent).read_manifest()
    require_sweep(found, "run")
    return found


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"config": {',
        b"[]",
        b"null",
        b"\xff{}",
        b"[" * 100_000,
        b'{"schema_version": "2"}',
        b'{"defaults": 3}',
        b'{"config": {}}',
    ],
)
def test_a_damaged_manifest_is_reported_in_one_line(
    content: bytes, file: Path, tmp_path: Path
) -> None:
    file.write_bytes(content)
    for words in (
        ("run", tmp_path / "test.yaml", "--scheduler", "serial", "--out", file.parent),
        ("status", file.parent),
        ("report", file.parent),
        ("compare", file.parent, file.parent),
        ("publish", file.parent, "--out", tmp_path / "published"),
    ):
        done = sweep(*words)
        assert (done.exit_code, after_preparing(done)) == (2, ""), words
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"sweep: {file}: is ")
        assert line.endswith(
            "Restore it, or move it away: `sweep run` with the same config writes it again"
        )


def test_a_manifest_of_a_newer_program_asks_for_an_update(file: Path) -> None:
    file.write_text('{"schema_version": 3, "defaults": "written otherwise since"}')
    with pytest.raises(RunMismatch, match=r"schema 3, newer than 2\. Update"):
        read_checked(file)


READ = {  # the keys that the program reads, by the path to their object
    (): (
        "name",
        "config",
        "config_path",
        "selection",
        "asked",
        "fingerprints",
        "defaults",
        "invocations",
    ),
    ("config",): ("name", "grids"),
    ("selection",): ("set", "where", "instruments"),
    ("invocations", 0): ("time", "command", "choice", "skips", "asked", "marks"),
    ("invocations", 0, "choice"): ("infer_oom", "repeat", "retry", "only", "fresh"),
    ("invocations", 1): ("asks_for",),  # of an older version
    ("invocations", 1, "asks_for"): ("choice",),
    ("invocations", 1, "asks_for", "choice"): ("infer_oom", "repeat", "retry", "only", "fresh"),
}


def within(value: Any, place: Iterable[str | int]) -> Any:
    return reduce(lambda holder, step: holder[step], place, value)


@pytest.mark.parametrize(
    ("place", "name"), [(place, name) for place, names in READ.items() for name in names]
)
def test_a_key_of_a_wrong_type_is_refused(
    place: tuple[str | int, ...], name: str, file: Path
) -> None:
    good = read_checked(file)
    entry = good["invocations"][0]
    old = {"time": "then", "command": ["run"], "asks_for": {"choice": entry["choice"]}}
    good["invocations"] = [entry, old]
    for wrong in (wrong for wrong in WRONG if type(wrong) is not type(within(good, place)[name])):
        bad = deepcopy(good)
        within(bad, place)[name] = wrong
        file.write_text(json.dumps(bad))
        with pytest.raises(
            RunError, match=r"is damaged, or of another program: .*Restore it, or move it away"
        ):
            read_checked(file)


def test_a_mark_that_is_no_number_is_refused(file: Path) -> None:
    good = read_checked(file)
    entry = {**good["invocations"][0], "marks": {"3f2a": "1"}}
    file.write_text(json.dumps({**good, "invocations": [entry]}))
    with pytest.raises(RunError, match=r"is damaged, or of another program"):
        read_checked(file)


def test_unknown_keys_are_ignored(file: Path) -> None:
    good = read_checked(file)
    file.write_text(
        json.dumps(
            {**good, "weather": "fine", "invocations": [{**good["invocations"][0], "mood": 1}]}
        )
    )
    assert read_checked(file)["weather"] == "fine"


def test_bytes_that_are_not_utf8_stay_in_a_command(file: Path) -> None:
    # A command line may name a folder whose name is not UTF-8.
    good = read_checked(file)
    odd = {
        **good,
        "config_path": "\udcff.yaml",
        "invocations": [{**good["invocations"][0], "command": ["run", "\udcff.yaml"]}],
    }
    file.write_text(json.dumps(odd))
    assert read_checked(file) == odd


def test_a_manifest_that_differs_from_what_was_written_is_damaged(file: Path) -> None:
    text = file.read_text()
    for before, after in (('"asked": 4', '"asked": 5'), ('"name": "t', '"name": "T')):
        assert before in text
        file.write_text(text.replace(before, after))
        with pytest.raises(RunError, match=r"is damaged: it differs from .*Restore it, or move"):
            read_checked(file)
    older = json.loads(text)
    assert len(older.pop("digest")) == 64
    file.write_text(json.dumps(older))
    assert read_checked(file) == older
