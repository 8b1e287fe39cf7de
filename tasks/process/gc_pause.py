"""Pause Python's garbage collection while steps are timed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_imports_are_frozen = False  # a forked child inherits it from its fork server


def freeze_imports() -> None:
    """Exclude all objects from later collections, in this process and in its forked children."""
    # A collection in a child would write to every page with objects, which copies the page.
    global _imports_are_frozen
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
