"""What Python makes of sources once, and else in every process that imports them: torch's take
longer than most cells.

Images of containers often have none beside the sources (`pip install --no-compile`) and let nobody
write it there (PYTHONDONTWRITEBYTECODE, a read-only file system).
"""

from __future__ import annotations

import os
import sys
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from orchestrator.common.user_cache import cache_folder


def keep_bytecode() -> None:
    """From here on, in this process and those that it starts, it is kept in this program's own
    cache where it is kept nowhere.
    """
    if sys.pycache_prefix is None and not _is_kept("torch"):
        folder = cache_folder("bytecode")
        if _may_be_written(folder):
            os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
            os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(folder)
            sys.dont_write_bytecode = False


def _is_kept(package: str) -> bool:
    """Whether it is there, or Python itself will write it; or there is nothing to keep."""
    found = find_spec(package)
    if found is None or found.origin is None:
        return True
    kept = Path(cache_from_source(found.origin))
    return kept.exists() or (not sys.dont_write_bytecode and os.access(kept.parent.parent, os.W_OK))


def _may_be_written(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)
