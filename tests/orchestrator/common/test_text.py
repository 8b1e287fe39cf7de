"""Words of a command are one line, and a shell reads the same names from it."""

from __future__ import annotations

import subprocess

import pytest

from orchestrator.common.text import shell_command, shell_word


@pytest.mark.parametrize(
    "name",
    ["a b", "a\nb", "it's", "it's\na", "back\\slash\nn", "\x1b[31m", "größe 結果", "a\u2028b"],
)
def test_a_shell_reads_a_name_back_from_one_line(name: str) -> None:
    command = shell_command(["printf", "%s", name])
    assert command.isprintable()
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == name


def test_a_printable_name_is_quoted_as_usual() -> None:
    assert (shell_word("results/a"), shell_word("a b")) == ("results/a", "'a b'")
