"""A cache that cannot be written costs time and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.common.user_cache import cache_folder, read_cached, write_cached
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


def test_a_folder_has_its_newest_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for number in range(5):
        write_cached("cells", f"key {number}", b"%d" % number, most=3)
        os.utime(cache_folder("cells") / f"key {number}", (number, number))
    found = [read_cached("cells", f"key {number}") for number in range(5)]
    assert found == [None, None, b"2", b"3", b"4"]
    assert len(list(cache_folder("cells").iterdir())) == 3


def test_a_cache_that_cannot_be_written_costs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    write_cached("cells", "key", b"content", most=3)
    assert read_cached("cells", "key") is None


def test_a_model_config_is_looked_for_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert find_model_config("no/such-model", ()) is None
