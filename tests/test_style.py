"""Language of the product: docstrings open with a verb or a noun phrase, and some words do not occur."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.conftest import ROOT
from tests.support.plain_words import DIALECT_WORD

OPENERS = re.compile(r"(Of|What|Whether|That|Those|As|So|Where|How|Who|Why|By|In|From|The same)\b")
FILES = sorted(
    path for folder in ("model", "tasks", "orchestrator") for path in (ROOT / folder).rglob("*.py")
)


def docstrings(tree: ast.AST) -> list[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    return [text for node in nodes if (text := ast.get_docstring(node))]


def complaints(path: Path) -> list[str]:
    """Return the docstrings of a file that open wrongly and its lines with a wrong word."""
    text = path.read_text()
    opened = [doc for doc in docstrings(ast.parse(text)) if OPENERS.match(doc)]
    return opened + [line for line in text.splitlines() if DIALECT_WORD.search(line)]


def test_the_product_is_in_plain_words() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {complaint}" for path in FILES for complaint in complaints(path)
    ]
    assert not found
