"""Import what a cell names as `package.module:Name`: a model, an optimizer or a loss."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

from tasks.spec.source_digest import shadowed_spec


def import_named(path: str, axis: str) -> Callable[..., Any]:
    """Import an object by its path. Raise an error that names what is missing or wrong."""
    module, _, name = path.partition(":")
    top, dot, rest = module.partition(".")
    try:
        if spec := shadowed_spec(top, sys.path):
            top = _import_as(f"own_{top}", spec)
        imported = importlib.import_module(f"{top}{dot}{rest}")
    except ModuleNotFoundError as error:
        if error.name != top:
            raise
        raise ModuleNotFoundError(
            f"{axis}: there is no module {top!r}. Install its package, or add its folder to "
            "PYTHONPATH",
            name=top,
        ) from error
    except SystemExit as error:
        # A script that parses its arguments or trains when it is imported.
        raise ImportError(
            f"{axis}: importing {module} ended the process (SystemExit: {error}), as a script does."
            f' Put what it runs below `if __name__ == "__main__":`, or move {name} to a module without'
            " it"
        ) from error
    found: Callable[..., Any] = getattr(imported, name)
    if not callable(found):
        kind = type(found).__name__
        raise TypeError(f"{axis}: {path} is a {kind}, where a class or a function is needed")
    return found


def _import_as(name: str, spec: ModuleSpec) -> str:
    """Import a module of the user under another name, because its own is taken."""
    if name not in sys.modules:
        renamed = spec_from_file_location(
            name, spec.origin, submodule_search_locations=spec.submodule_search_locations
        )
        assert renamed is not None
        assert renamed.loader is not None
        sys.modules[name] = module_from_spec(renamed)
        renamed.loader.exec_module(sys.modules[name])
    return name
