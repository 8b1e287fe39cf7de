"""A cache that cannot be written costs time and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.common.files import cache_folder
from tasks.spec.source_digest import find_model_config


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("home", ["missing", "unknown"])
def test_a_cache_has_a_path_without_a_home(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/proc/none")
    if home == "unknown":
        monkeypatch.setattr(Path, "home", no_home)
    assert cache_folder("copies").parts[-2:] == ("transformer-sweep", "copies")


def test_a_model_config_is_looked_for_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert find_model_config("no/such-model", ()) is None
