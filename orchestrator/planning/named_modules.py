"""Find the modules of models, optimizers and losses that a config names, without importing them.

A name that is wrong is wrong in every cell: it is reported before the first one, and before a
results folder is created. So is a file of the user that does not compile, or that imports a module
that is missing. What only an import shows, such as wrong arguments, fails in the cells.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from orchestrator.common.errors import ConfigError
from orchestrator.common.suggestions import suggestion
from orchestrator.config.yaml_source import KeyPath, Source
from tasks.spec.cell import Cell
from tasks.spec.source_digest import INSTALLED, OWN_PACKAGES, shadowed_spec

# Not hf:NAME, which names a model of transformers.
_NAMED = re.compile(r"(?!hf:)[A-Za-z_][\w.]*:[A-Za-z_]\w*")
# Code that changes how modules are found: only an import shows which ones are missing.
_CHANGES_IMPORTS = re.compile(
    rb"sys\.(path|modules|meta_path|path_hooks)|from sys import|addsitedir"
)
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
        for axis, value in cell.params.non_default().items():
            if isinstance(value, str) and _NAMED.fullmatch(value):
                named[axis, value] = None
    for axis, value in named:
        if problem := _problem(value, paths):
            where = source.where(_place(source.document, axis, value))
            raise ConfigError(f"{where}: {axis} {value!r}: {problem[0]}", problem[1])


def _problem(value: str, paths: Sequence[str]) -> tuple[str, str] | None:
    """Return what is wrong with a name and the remedy, or None."""
    module, _, name = value.partition(":")
    specs, missing = _find(module, paths)
    if missing:
        return f"there is no module {missing!r}", _INSTALL.get(missing, _REMEDY)
    if problem := _import_problem(specs, paths):
        return problem
    found = specs[-1]
    # The folders of a namespace package are known only after it was imported.
    names = _names_in(found) if found.name == module else None
    if names is None or name in names:
        return None
    near = suggestion(name, sorted(names))
    remedy = near if near.endswith("?") else "Name a class or a function of it"
    return f"{found.origin} has no {name}", remedy


def _find(module: str, paths: Sequence[str]) -> tuple[list[ModuleSpec], str]:
    """Return the packages of a module and the module itself, or the name of the missing one.

    The list ends at a namespace package, whose folders are known only after it was imported.
    """
    top, *rest = module.split(".")
    found = shadowed_spec(top, paths) or PathFinder.find_spec(top, list(paths))
    found = found or importlib.util.find_spec(top)  # packages that are installed in place
    path, specs = top, []
    for part in [*rest, ""]:
        if found is None:
            return [], path
        specs.append(found)
        if found.origin is None or not part:
            break
        path = f"{path}.{part}"
        found = PathFinder.find_spec(path, found.submodule_search_locations or [])
    return specs, ""


def _import_problem(specs: Sequence[ModuleSpec], paths: Sequence[str]) -> tuple[str, str] | None:
    """Return why the import of the user's own files fails, and the remedy, or None.

    It follows the imports that every import of a file executes: not those within functions,
    conditions and `try`. Installed packages are not read.
    """
    pending, seen = list(specs), set[str]()
    while pending:
        origin = pending.pop(0).origin or ""
        if origin in seen or not _is_own(origin):
            continue
        seen.add(origin)
        try:
            source = Path(origin).read_bytes()
            tree = _compiled(source, origin)
        except SyntaxError as error:
            place = f"{origin}:{error.lineno}" if error.lineno else origin
            return f"{place}: {type(error).__name__}: {error.msg}", "Correct this line"
        except (OSError, ValueError, RecursionError, MemoryError):
            continue
        if _CHANGES_IMPORTS.search(source):
            return None
        for line, name in _imports(tree):
            top = name.partition(".")[0]
            if top in OWN_PACKAGES or top in sys.stdlib_module_names:
                continue
            imported, missing = _find(top, paths)
            # Other packages may make submodules in code, as `six.moves` is.
            if imported and _is_own(imported[0].origin or ""):
                imported, missing = _find(name, paths)
            if missing:
                problem = f"{origin}:{line}: ModuleNotFoundError: No module named {missing!r}"
                return problem, _INSTALL.get(missing, _REMEDY)
            pending += imported
    return None


def _is_own(origin: str) -> bool:
    """True for a Python file that belongs to the user, not to Python or an installed package."""
    path = Path(origin)
    is_installed = not set(INSTALLED).isdisjoint(path.parts)
    is_of_python = path.is_relative_to(sysconfig.get_path("stdlib"))
    return path.suffix == ".py" and not is_installed and not is_of_python


def _compiled(source: bytes, name: str) -> ast.Module:
    """Return the tree of a file's source. Raise SyntaxError as an import would."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the user's code; the import repeats them
        tree = ast.parse(source, name)
        compile(tree, name, "exec", dont_inherit=True)  # finds more, such as a misplaced return
    return tree


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each module that every import of a file imports."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module


def _names_in(module: ModuleSpec) -> set[str] | None:
    """Return the names that a Python file binds, or None if its text does not tell them all."""
    if not module.origin or not module.origin.endswith(".py"):
        return None
    try:
        tree = ast.parse(Path(module.origin).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
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
