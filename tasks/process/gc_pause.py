"""Pause Python's garbage collection while steps are timed, and while modules are imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_imports_are_frozen = False  # a forked child inherits it from its fork server


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Exclude all objects that exist after the body from later collections.

    This holds for this process and its forked children: a collection in a child would write to
    every page with objects, which copies the page.
    """
    global _imports_are_frozen
    # Imports make objects that stay. 700 collections that find this out again and again took a
    # quarter of the CPU time of importing torch and torch._dynamo.
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    gc.collect()
    gc.freeze()
    _imports_are_frozen = True


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection, and exclude the objects that exist already from later ones."""
    gc.collect()
    # Frozen imports stay frozen: each later collection would examine them, which takes 0.2 s.
    # gc.get_freeze_count() would find out, but walks through all of them, which takes 25 ms.
    if not _imports_are_frozen:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if not _imports_are_frozen:
            gc.unfreeze()
