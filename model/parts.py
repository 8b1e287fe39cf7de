"""Names parts of the model that are functions, not modules, for profilers and memory trackers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Namer = Callable[[str], AbstractContextManager[object]]
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

# Names of parts by the names of their functions.
PART_FUNCTIONS: dict[str, str] = {}

_namer: Namer | None = None


def part(name: str) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Decorate a function so that it runs inside of `namer(name)` while parts are named."""

    def name_it(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        PART_FUNCTIONS[function.__name__] = name

        @wraps(function)
        def named(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            # With this test first, the compiler never traces the namer, and does not compile again
            # when an instrument watches.
            if torch.compiler.is_compiling() or _namer is None:
                return function(*args, **kwargs)
            with _namer(name):
                return function(*args, **kwargs)

        return named

    return name_it


@contextmanager
def parts_named_by(namer: Namer) -> Iterator[None]:
    """Run each part inside of `namer(name)`, on all threads, within this context."""
    global _namer
    before, _namer = _namer, namer
    try:
        yield
    finally:
        _namer = before
