"""Find the modules of models, optimizers and losses that a config names, without importing them.

A name that is wrong is wrong in every cell: it is reported before the first one, and before a
results folder is created. So is a syntax error. What only an import shows fails in the cells: the
machine that plans may lack packages of the hosts that measure.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from orchestrator.common.errors import ConfigError
from orchestrator.common.suggestions import suggestion
from orchestrator.config.yaml_source import KeyPath, Source
from tasks.spec.cell import Cell
from tasks.spec.source_digest import shadowed_spec

# Not hf:NAME, which names a model of transformers, and not the number of `every:2`. The rest may be
# anything: a path, for example, is reported as no module.
_NAMED = re.compile(r"(?!hf:).+:(?!\d).+", re.DOTALL)
_PATH = re.compile(r".*[/\\]|\.py$")
_REMEDY = "Install its package, or put its file next to the config or into the current folder"
# Remedies for packages of optimizers that training scripts use.
_INSTALL = {
    "bitsandbytes": "Run pip install bitsandbytes. Its optimizers run on an NVIDIA GPU only",
    "torchao": "Run pip install torchao",
}


def require_modules(cells: Iterable[Cell], paths: Sequence[str], source: Source) -> None:
    """Raise ConfigError for a value `package.module:Name` of a cell that cannot be imported.

    paths: the folders to import from, like sys.path.
    """
    named: dict[tuple[str, str], None] = {}
    for cell in cells:
        for axis, value in cell.params.non_default.items():
            if isinstance(value, str) and _NAMED.fullmatch(value):
                named[axis, value] = None
    for axis, value in named:
        if problem := _problem(value, paths):
            where = source.where(_place(source.document, axis, value))
            raise ConfigError(f"{where}: {axis} {value!r}: {problem[0]}", problem[1])


def _problem(value: str, paths: Sequence[str]) -> tuple[str, str] | None:
    """Return what is wrong with a name and the remedy, or None."""
    module, _, name = value.partition(":")
    top, *rest = module.split(".")
    path, found = module, None
    if all((top, *rest)):
        path = top
        found = shadowed_spec(top, paths) or PathFinder.find_spec(top, list(paths))
        found = found or importlib.util.find_spec(top)  # packages that are installed in place
    for part in rest:
        if found is None:
            break
        # The folders of a namespace package are known only after it was imported.
        if found.origin is None:
            return None
        path = f"{path}.{part}"
        found = PathFinder.find_spec(path, found.submodule_search_locations or [])
    if found is None and _PATH.search(module):
        own = _PATH.sub("", module)
        remedy = (
            f"Write {own}:{name}, and put its file next to the config or into the current folder"
        )
        return f"{module!r} is a path, not the name of a module", remedy
    if found is None:
        return f"there is no module {path!r}", _INSTALL.get(path, _REMEDY)
    try:
        names = _names_in(found)
    except SyntaxError as error:
        return f"{found.origin}:{error.lineno}: SyntaxError: {error.msg}", "Correct this line"
    if names is None or name in names:
        return None
    near = suggestion(name, sorted(names))
    remedy = near if near.endswith("?") else "Name a class or a function of it"
    return f"{found.origin} has no {name}", remedy


def _names_in(module: ModuleSpec) -> set[str] | None:
    """Return the names that a Python file binds, or None if its text does not tell them all.

    Raise SyntaxError.
    """
    if not module.origin or not module.origin.endswith(".py"):
        return None
    try:
        tree = ast.parse(Path(module.origin).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.alias():
                names.add((node.asname or node.name).partition(".")[0])
            case _:
                pass
    return None if {"*", "__getattr__"} & names else names


def _place(document: object, axis: str, value: str) -> KeyPath:
    """Return the place in a config that gives an axis this value, or () if an option does."""
    for place, found in _leaves(document):
        if found == value and axis in place:
            return place
    return ()


def _leaves(node: object, place: KeyPath = ()) -> Iterator[tuple[KeyPath, object]]:
    items: Iterable[tuple[str | int, object]] = ()
    if isinstance(node, Mapping):
        items = node.items()
    elif isinstance(node, list):
        items = enumerate(node)
    for key, child in items:
        if isinstance(child, Mapping | list):
            yield from _leaves(child, (*place, key))
        else:
            yield (*place, key), child
