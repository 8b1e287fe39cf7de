"""The README and the pages of docs/ as text, and the commands in them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.conftest import ROOT

PAGES = sorted(
    [
        *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
        *(ROOT / "docs").rglob("*.md"),
    ]
)
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in PAGES}


def shell_lines(text: str) -> list[str]:
    """Return the lines of all shell blocks, without comments; continued ones are joined."""
    blocks = re.findall(r"```sh\n(.*?)```", text.replace("\\\n", ""), re.DOTALL)
    return [line.split("   #")[0].strip() for block in blocks for line in block.splitlines()]


def sweep_commands(page: str) -> list[str]:
    """Return the lines that start a command of the program; `sweep --version` is none."""
    return [line for line in shell_lines(TEXTS[page]) if re.match(r"sweep \w", line)]


def headings(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub names them."""
    found = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in found}
