"""Digests of source code: they identify what was measured, with or without a git commit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

# Installed packages are identified by their version, and would take long to read.
_INSTALLED = ("site-packages", "dist-packages")


def source_digest(model: str, paths: Sequence[str]) -> str | None:
    """Return a digest of the top-level module or package of `package.module:Factory`.

    The digest covers all its Python files, and nothing is imported. Return None if the package is
    installed, or not found in `paths`, which is like sys.path.
    """
    spec = PathFinder.find_spec(model.partition(":")[0].partition(".")[0], list(paths))
    if spec is None:
        return None
    folders = spec.submodule_search_locations
    roots = [Path(root) for root in folders or filter(None, [spec.origin])]
    files: list[Path] = []
    for root in roots:
        files += python_files(root) if root.is_dir() else [root]
    if not files or any(part in _INSTALLED for file in files for part in file.parts):
        return None
    return digest_of((file.name, file) for file in sorted(files))


def python_files(folder: Path) -> list[Path]:
    """Return the Python files in a folder and below, sorted, without hidden files and folders."""
    found = []
    for file in folder.rglob("*.py"):
        # Editors and notebooks write hidden copies (`.ipynb_checkpoints`), which would change the
        # digest.
        is_hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if file.is_file() and not is_hidden:
            found.append(file)
    return sorted(found)


def digest_of(files: Iterable[tuple[str, Path]]) -> str:
    """Return a digest of files' names and contents, 12 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, file in files:
        digest.update(name.encode() + file.read_bytes())
    return digest.hexdigest()[:12]
