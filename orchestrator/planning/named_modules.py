"""Find the modules of models, optimizers and losses that a config names, without importing them.

A name that is wrong is wrong in every cell: it is reported before the first one, and before a
results folder is created. So is a syntax error, and an argument that a model does not take. What
only an import shows fails in the cells: the machine that plans may lack packages of the hosts that
measure.
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
    _require_arguments(cells, paths, source)


def _require_arguments(cells: Iterable[Cell], paths: Sequence[str], source: Source) -> None:
    """Raise ConfigError for a key of `model_args` that the model of its cell does not take."""
    checked: dict[str, set[str] | None] = {}
    for cell in cells:
        given = cell.params.non_default
        model, arguments = str(given.get("model")), given.get("model_args", {})
        if not arguments or not _NAMED.fullmatch(model):
            continue
        if model not in checked:
            checked[model] = _arguments_of(model, paths)
        allowed = checked[model]
        for key in arguments:
            if allowed is not None and key not in allowed:
                where = source.where(_place_of_key(source.document, "model_args", key))
                problem = f"{where}: {model} takes no argument {key!r}"
                raise ConfigError(problem, suggestion(key, sorted(allowed)))


def _arguments_of(value: str, paths: Sequence[str]) -> set[str] | None:
    """Return the names of the arguments of a function or class, or None if its text is no answer."""
    found, _ = _find_module(value.partition(":")[0], paths)
    tree = None if found is None else _parse(found)
    if tree is None:
        return None
    name = value.partition(":")[2]
    # An assignment, an import or another definition may bind the name again.
    binding = [node for node in ast.walk(tree) if name in _bound_by(node)]
    node = binding[0] if len(binding) == 1 and binding[0] in tree.body else None
    if isinstance(node, ast.ClassDef):
        makers = [one for one in node.body if getattr(one, "name", None) in ("__init__", "__new__")]
        is_plain = not (node.decorator_list or node.keywords) and len(makers) == 1
        node = makers[0] if is_plain else None
    # A decorator may change what a function takes.
    if not isinstance(node, ast.FunctionDef) or node.decorator_list or node.args.kwarg:
        return None
    positional = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
    own = positional[1:] if node.name in ("__init__", "__new__") else positional
    return {*own, *(one.arg for one in node.args.kwonlyargs)}


def _problem(value: str, paths: Sequence[str]) -> tuple[str, str] | None:
    """Return what is wrong with a name and the remedy, or None."""
    module, _, name = value.partition(":")
    found, path = _find_module(module, paths)
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


def _find_module(module: str, paths: Sequence[str]) -> tuple[ModuleSpec | None, str]:
    """Return a module, or None with the part of its path that was not found.

    Of a module in a namespace package, which only an import finds, return the package.
    """
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
            break
        path = f"{path}.{part}"
        found = PathFinder.find_spec(path, found.submodule_search_locations or [])
    return found, path


def _names_in(module: ModuleSpec) -> set[str] | None:
    """Return the names that a Python file binds, or None if its text does not tell them all.

    Raise SyntaxError.
    """
    tree = _parse(module)
    if tree is None:
        return None
    names = {name for node in ast.walk(tree) for name in _bound_by(node)}
    return None if {"*", "__getattr__"} & names else names


def _bound_by(node: ast.AST) -> tuple[str, ...]:
    """Return the name that a part of a program binds, if it binds one."""
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
            return (name,)
        case ast.Name(id=name, ctx=ast.Store()):
            return (name,)
        case ast.alias():
            return ((node.asname or node.name).partition(".")[0],)
    return ()


def _parse(module: ModuleSpec) -> ast.Module | None:
    """Return the tree of a Python file, or None if it is another file. Raise SyntaxError."""
    if not module.origin or not module.origin.endswith(".py"):
        return None
    try:
        return ast.parse(Path(module.origin).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def _place_of_key(document: object, axis: str, key: str) -> KeyPath:
    """Return the place in a config of a key of a mapping, or () if an option gives it."""
    for place, _ in _leaves(document):
        for index, step in enumerate(place):
            if step == f"{axis}.{key}" or place[index : index + 2] == (axis, key):
                return place[: index + 1 + (step == axis)]
    return ()


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
