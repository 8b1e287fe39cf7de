"""Digests of source code and of models' configs: they identify what was measured.

They work with or without a git commit, and without network access.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

# Installed packages are identified by their version, and would take long to read.
_INSTALLED = ("site-packages", "dist-packages")
_IMPORTS = ("import_module", "__import__")
_OWN_PACKAGES = ("model", "tasks", "orchestrator")
HUB = "hf:"
MODEL_CONFIG = "config.json"
_PROGRAM_ROOT = Path(__file__).resolve().parents[2]


def source_digest(model: str, paths: Sequence[str]) -> str | None:
    """Return a digest of the code of `package.module:Factory`.

    The digest covers all Python files of the top-level module or package, and of those that it
    imports, directly or not. Installed packages, Python's own and this program's are left out, and
    so is data that the model reads. Nothing is imported. Return None if the package is installed,
    or not found in `paths`, which is like sys.path. Of `hf:NAME`, it is the digest of config.json.
    """
    if model.startswith(HUB):
        file = find_model_config(model.removeprefix(HUB), paths)
        return digest_of([(MODEL_CONFIG, file)]) if file is not None else None
    name = model.partition(":")[0].partition(".")[0]
    spec = shadowed_spec(name, paths) or PathFinder.find_spec(name, list(paths))
    files = _files_of(spec)
    if not files:
        return None
    pending, seen = list(files), {name, *_OWN_PACKAGES, *sys.stdlib_module_names}
    while pending:
        for imported in _imports(pending.pop().read_bytes()) - seen:
            seen.add(imported)
            found = _files_of(PathFinder.find_spec(imported, list(paths)))
            files += found
            pending += found
    return digest_of((file.name, file) for file in sorted(set(files)))


def find_model_config(name: str, folders: Iterable[str]) -> Path | None:
    """Return config.json of a model of transformers: in one of the folders, or the hub's cache."""
    files = [Path(folder) / name / MODEL_CONFIG for folder in folders]
    # Not Path.home(), which raises for a user without a home.
    home = Path(os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    cached = cache / f"models--{name.replace('/', '--')}"
    main = cached / "refs" / "main"  # the commit that the hub's client downloaded last
    if main.is_file():
        files.append(cached / "snapshots" / main.read_text().strip() / MODEL_CONFIG)
    for file in files:
        if file.is_file():
            return file
    return None


def shadowed_spec(name: str, paths: Sequence[str]) -> ModuleSpec | None:
    """Return the user's own module whose name this program or Python also uses, such as `model`."""
    if name not in _OWN_PACKAGES and name not in sys.stdlib_module_names:
        return None
    library = Path(sysconfig.get_path("stdlib"))
    own = []
    for path in map(Path, paths):
        is_own = not path.is_relative_to(library) and not _is_installed(path)
        if is_own and path.resolve() != _PROGRAM_ROOT:
            own.append(str(path))
    spec = PathFinder.find_spec(name, own)
    if spec is not None and spec.origin is not None:
        return spec
    return None


def is_clone(folder: str) -> bool:
    """Return True for the clone that this program runs from: a file in it is not the user's."""
    return Path(folder).resolve() == _PROGRAM_ROOT and not _is_installed(_PROGRAM_ROOT)


@lru_cache(maxsize=1024)  # asked for each call of an emulated function
def is_of_user(file: str) -> bool:
    """Return True for a file that is neither installed nor in a package of this program."""
    path = Path(file)
    is_own = any(path.is_relative_to(_PROGRAM_ROOT / package) for package in _OWN_PACKAGES)
    return not is_own and not _is_installed(path)


def _files_of(spec: ModuleSpec | None) -> list[Path]:
    """Return the files of a top-level module or package, or none if it is installed."""
    if spec is None:
        return []
    roots = list(map(Path, spec.submodule_search_locations or filter(None, [spec.origin])))
    # The roots come first: a model imports torch, whose 2,500 files would be looked for in vain.
    if any(map(_is_installed, roots)):
        return []
    files: list[Path] = []
    for root in roots:
        files += python_files(root) if root.is_dir() else [root]
    return [] if any(map(_is_installed, files)) else files


def _is_installed(path: Path) -> bool:
    return not set(_INSTALLED).isdisjoint(path.parts)


@lru_cache(maxsize=1024)  # each cell of a model asks again, and parsing takes most of the time
def _imports(source: bytes) -> frozenset[str]:
    """Return the top-level names that a file's source imports, also within functions."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # an extension module, for example
        return frozenset()
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module or "")
        elif isinstance(node, ast.Call) and _called_name(node) in _IMPORTS:
            names += [str(one.value) for one in node.args[:1] if isinstance(one, ast.Constant)]
    return frozenset(name.partition(".")[0] for name in names) - {""}


def _called_name(call: ast.Call) -> str:
    """Return `g` of a call of `g` or of `f.g`; empty for other expressions."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def python_files(folder: Path) -> list[Path]:
    """Return the Python files in a folder and below, sorted, without hidden files and folders."""
    found = []
    for path, folders, names in os.walk(folder):
        # Editors and notebooks write hidden copies (`.ipynb_checkpoints`), which would change the
        # digest.
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.endswith(".py") and not name.startswith("."):
                found.append(Path(path, name))
    return sorted(filter(Path.is_file, found))


def digest_of(files: Iterable[tuple[str, Path]]) -> str:
    """Return a digest of files' names and contents, 12 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, file in files:
        digest.update(name.encode() + file.read_bytes())
    return digest.hexdigest()[:12]
