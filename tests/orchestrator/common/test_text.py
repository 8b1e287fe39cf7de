"""Words of a command are one line, and a shell reads the same names from it."""

from __future__ import annotations

import subprocess

import pytest

from orchestrator.common.text import (
    cells_and_verb,
    failure_reason,
    shell_command,
    shell_path,
    shell_word,
    without_separator,
)


@pytest.mark.parametrize(
    "name",
    ["a b", "a\nb", "it's", "it's\na", "back\\slash\nn", "\x1b[31m", "größe 結果", "a\u2028b"],
)
def test_a_shell_reads_a_name_back_from_one_line(name: str) -> None:
    command = shell_command(["printf", "%s", name])
    assert command.isprintable()
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == name


def test_no_path_of_a_command_is_taken_for_an_option() -> None:
    paths = ("-r", "-a b", "a-b", "./-r", "s3://b/-r")
    assert [*map(shell_path, paths)] == ["./-r", "'./-a b'", "a-b", "./-r", "s3://b/-r"]
    assert without_separator(["run", "--", "-c.yaml"]) == ["run", "./-c.yaml"]


def test_a_printable_name_is_quoted_as_usual() -> None:
    assert (shell_word("results/a"), shell_word("a b")) == ("results/a", "'a b'")


@pytest.mark.parametrize(
    ("evidence", "reason"),
    [
        ({"exception": "RuntimeError", "message": "it broke\nhere"}, "RuntimeError: it broke"),
        ({"exception": "Own.Error", "message": "Error: 3 (a.py:1)"}, "Error: 3 (a.py:1)"),
        (
            {"exception": "OutOfMemoryError", "message": "CUDA out of memory."},
            "CUDA out of memory.",
        ),
        ({"exception": "RuntimeError", "reason": "a rank ended", "message": "x"}, "a rank ended"),
        ({"exception": "RuntimeError", "message": ""}, "RuntimeError"),
        ({"message": "it broke"}, "it broke"),
        ({"message": "it broke", "rank": 0}, "rank 0: it broke"),
        ({"message": "rank 2 is late", "rank": 2}, "rank 2 is late"),
        ({"asked_bytes": 2**30, "rank": 1}, "rank 1: out of memory: asked for 1 GiB"),
    ],
)
def test_a_reason_begins_with_the_rank_and_the_type_of_its_exception(
    evidence: dict[str, object], reason: str
) -> None:
    assert failure_reason(evidence) == reason


def test_a_single_cell_has_a_verb_in_the_singular() -> None:
    assert cells_and_verb(1, "needs", "need") == "1 cell needs"
    assert cells_and_verb(0, "needs", "need") == "0 cells need"
