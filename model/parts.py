"""Names for parts of the model that are functions and no modules, for whoever wants to see where the time goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Namer = Callable[[str], AbstractContextManager[object]]
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

PART_FUNCTIONS: dict[
    str, str
] = {}  # the names of all functions that are parts, and those of the parts

_namer: Namer | None = None


def part(name: str) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Decorates a function: while parts are named, it runs inside of `namer(name)`; else it just runs."""

    def name_it(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        PART_FUNCTIONS[function.__name__] = name

        @wraps(function)
        def named(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            # Asked first, the compiler never sees the name, and does not compile again where somebody watches.
            if torch.compiler.is_compiling() or _namer is None:
                return function(*args, **kwargs)
            with _namer(name):
                return function(*args, **kwargs)

        return named

    return name_it


@contextmanager
def parts_named_by(namer: Namer) -> Iterator[None]:
    """While it lasts, each part runs inside of `namer(name)`, on whichever thread."""
    global _namer
    before, _namer = _namer, namer
    try:
        yield
    finally:
        _namer = before
