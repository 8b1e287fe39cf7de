"""Which code a cell measures, the user's own or this program's: told by what it says, whatever commit it is in, if in any."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

_INSTALLED = ("site-packages", "dist-packages")  # versions tell those, and they are large


def source_digest(model: str, paths: Sequence[str]) -> str | None:
    """Of all Python files of the top-level module or package that `package.module:Factory` is in; nothing of it is imported.

    paths: where it is looked for, as in sys.path. None of what is not found there, or is installed.
    """
    spec = PathFinder.find_spec(model.partition(":")[0].partition(".")[0], list(paths))
    if spec is None:
        return None
    roots = [
        Path(place)
        for place in spec.submodule_search_locations or ([spec.origin] if spec.origin else [])
    ]
    files = sorted(
        file for root in roots for file in (python_files(root) if root.is_dir() else [root])
    )
    if not files or any(part in _INSTALLED for file in files for part in file.parts):
        return None
    return digest_of((file.name, file) for file in files)


def python_files(folder: Path) -> list[Path]:
    """In it and below, but for those that an editor or a notebook keeps beside them, under names that begin with a dot."""
    found = (file for file in folder.rglob("*.py") if file.is_file())
    return sorted(
        file
        for file in found
        if not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )


def digest_of(files: Iterable[tuple[str, Path]]) -> str:
    """Of their contents, and of what they are called."""
    digest = hashlib.sha256()
    for name, file in files:
        digest.update(name.encode() + file.read_bytes())
    return digest.hexdigest()[:12]
