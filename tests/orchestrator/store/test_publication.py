"""publication.json is from somebody else: what it names, and each of its types, is checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.common.errors import RunError, RunMismatch
from orchestrator.store.run_collection import Publication, read_contents


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Return a publication of one run. Its folder also holds a run that it does not list."""
    folder = tmp_path / "published"
    for run in (tmp_path / "run", folder / "run"):
        run.mkdir(parents=True)
        (run / "run.json").write_text("{}")
    change(folder)
    return folder


def change(folder: Path, **values: object) -> None:
    contents: dict[str, Any] = {"schema_version": 1, "runs": ["run"], "files": {}, "left_out": []}
    text = json.dumps({**contents, "against": None, **values})
    (folder / "publication.json").write_text(text)


def test_a_publication_has_the_runs_that_it_lists(published: Path) -> None:
    read_contents(published, only="run/")
    assert Publication(published).contents.runs == ["run"]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("left_out", 5, "left_out: Input should be a valid list"),
        ("left_out", [5], "left_out.0: Input should be a valid string"),
        ("left_out", "abc", "left_out: Input should be a valid list"),
        ("runs", 5, "runs: Input should be a valid list"),
        ("runs", ["../run"], "runs[0] '../run' is not a folder of this publication"),
        ("runs", [".."], "runs[0] '..' is not a folder of this publication"),
        ("runs", ["run", "run"], "runs: a name is listed twice"),
        ("runs", [], "runs: there is none"),
        ("against", 5, "against: Input should be a valid string"),
        ("against", "zzz", "against 'zzz' is not a device with published numbers"),
        ("files", 5, "files: Input should be a valid dictionary"),
        ("files", {"../run/run.json": ""}, "files: '../run/run.json' is not a file of this"),
        ("cells", "x", "cells: Extra inputs are not permitted"),
        ("schema_version", "1", "schema_version: Input should be a valid integer"),
    ],
)
def test_a_wrong_list_is_refused_by_the_report_and_for_each_run(
    key: str, value: object, expected: str, published: Path
) -> None:
    change(published, **{key: value})
    for read in (lambda: Publication(published), lambda: read_contents(published, only="run/")):
        with pytest.raises(RunError) as refused:
            read()
        assert (
            f"{published}/publication.json: is damaged, or of another program: {expected}"
            in str(refused.value)
        )
        assert refused.value.remedy == f"Copy {published} again, or `git checkout` it"


def test_a_newer_publication_is_refused_for_each_run(published: Path) -> None:
    change(published, schema_version=99)
    with pytest.raises(RunMismatch, match=r"schema 99, newer than 2\. Update"):
        read_contents(published, only="run/")
