"""A run.json that is torn, or of another program, is one line with the remedy, whichever command reads it."""

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
from orchestrator.store.manifest import read_manifest, require_sweep
from tests.orchestrator.sweep.test_pipeline import request_of
from tests.support.fake_sweep import FakeScheduler, go, outcome_of

__all__ = ["request_of"]
WRONG = (None, 3, "x", [3], {"a": 3})


@pytest.fixture
def file(request_of: Callable[..., SweepRequest]) -> Path:
    """Of a run that a sweep wrote."""
    go(request_of(), FakeScheduler(outcome_of))
    return request_of().run.folder / "run.json"


def sweep(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], prog_name="sweep")


def of_its_own_program(file: Path) -> dict[str, Any]:
    found = read_manifest(file, "run.json", 1)
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
    ],
)
def test_whatever_reads_it_says_so_in_one_line(content: bytes, file: Path, tmp_path: Path) -> None:
    file.write_bytes(content)
    for words in (
        ("run", tmp_path / "test.yaml", "--scheduler", "serial", "--out", file.parent),
        ("status", file.parent),
        ("report", file.parent),
        ("compare", file.parent, file.parent),
        ("publish", file.parent, "--out", tmp_path / "published"),
    ):
        done = sweep(*words)
        assert (done.exit_code, done.stdout) == (2, ""), words
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"sweep: {file}: is ")
        assert line.endswith(
            "Restore it, or move it away: `sweep run` with the same config writes it again"
        )


def test_that_of_a_newer_program(file: Path) -> None:
    file.write_text('{"schema_version": 2, "defaults": "written otherwise since"}')
    with pytest.raises(RunMismatch, match=r"schema 2, newer than 1\. Update"):
        of_its_own_program(file)


READ = {  # of what is read of it, by the names that lead there
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
    ("selection",): ("set", "where", "instruments"),
    ("invocations", 0): ("time", "command", "asks_for", "asked"),
    ("invocations", 0, "asks_for"): ("choice",),
    ("invocations", 0, "asks_for", "choice"): (
        "infer_oom",
        "repeat",
        "retry",
        "only",
        "fresh",
    ),
}


def within(value: Any, place: Iterable[str | int]) -> Any:
    return reduce(lambda holder, step: holder[step], place, value)


@pytest.mark.parametrize(
    ("place", "name"), [(place, name) for place, names in READ.items() for name in names]
)
def test_what_is_read_of_it_is_of_its_type(
    place: tuple[str | int, ...], name: str, file: Path
) -> None:
    good = of_its_own_program(file)
    for wrong in (wrong for wrong in WRONG if type(wrong) is not type(within(good, place)[name])):
        bad = deepcopy(good)
        within(bad, place)[name] = wrong
        file.write_text(json.dumps(bad))
        with pytest.raises(
            RunError, match=r"is damaged, or of another program: .*Restore it, or move it away"
        ):
            of_its_own_program(file)


def test_what_a_later_program_adds_is_passed_over(file: Path) -> None:
    good = of_its_own_program(file)
    file.write_text(
        json.dumps(
            {**good, "weather": "fine", "invocations": [{**good["invocations"][0], "mood": 1}]}
        )
    )
    assert of_its_own_program(file)["weather"] == "fine"


def test_words_that_are_no_text_stay_what_they_are(file: Path) -> None:
    """Of a command line: a folder's name may be of any bytes."""
    good = of_its_own_program(file)
    odd = {
        **good,
        "config_path": "\udcff.yaml",
        "invocations": [{**good["invocations"][0], "command": ["run", "\udcff.yaml"]}],
    }
    file.write_text(json.dumps(odd))
    assert of_its_own_program(file) == odd
