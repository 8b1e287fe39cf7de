"""A cache that cannot be written costs time and nothing else."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from orchestrator.store.frame_cache import read_frame, write_frame

from orchestrator.common.files import cache_folder
from tasks.spec.source_digest import find_model_config


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("home", ["a file", "missing", "unknown", "writable"])
def test_a_home_that_cannot_be_written_has_no_cache(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "a file").write_text("")
    # /proc/… cannot be created, not even by root.
    homes = {"a file": tmp_path / "a file", "missing": Path("/proc/none"), "writable": tmp_path}
    monkeypatch.setenv("HOME", str(homes.get(home, "")))
    if home == "unknown":
        monkeypatch.setattr(Path, "home", no_home)
    frame = pd.DataFrame({"a": [1]})
    write_frame("key", frame, {"of": "two"})
    found = read_frame("key")
    assert (found is not None) == (home == "writable")
    assert cache_folder("cells").name == "cells"


def test_a_model_config_is_looked_for_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert find_model_config("no/such-model", ()) is None
