"""A cache for Python's bytecode on machines where torch has none.

Images of containers often hold torch without bytecode (`pip install --no-compile`) and do not let
Python write it (PYTHONDONTWRITEBYTECODE, or a read-only file system). Then every process that
imports torch compiles its sources again.
"""

from __future__ import annotations

import os
import sys
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from orchestrator.common.user_cache import cache_folder


def keep_bytecode() -> None:
    """Store bytecode in this program's cache if Python stores that of torch nowhere.

    This holds for this process and for those that it starts.
    """
    if sys.pycache_prefix is not None or _has_bytecode("torch"):
        return
    # About 80 MB. On two cores, a CUDA build of torch 2.11 and the part of its compiler that an
    # optimizer imports took 9 to 11 s of CPU time without it and 3.3 s with it: longer than most
    # cells.
    folder = cache_folder("bytecode")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(folder, os.W_OK):
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(folder)
        sys.dont_write_bytecode = False


def _has_bytecode(package: str) -> bool:
    """True if the package has bytecode, Python will write it, or the package does not exist."""
    found = find_spec(package)
    if found is None or found.origin is None:
        return True
    file = Path(cache_from_source(found.origin))
    return file.exists() or (not sys.dont_write_bytecode and os.access(file.parent.parent, os.W_OK))
