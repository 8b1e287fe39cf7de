"""Tests of derived cells in the user's cache: as good as derived ones, and never outdated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from orchestrator.analysis import results
from orchestrator.analysis.results import CODE, cells_key, load_results, load_with_samples
from orchestrator.common.errors import RunError
from orchestrator.store import frame_cache
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from orchestrator.store.run_writer import RunWriter
from tasks.spec.outcome import Outcome
from tests.test_architecture import ALLOWED, ALWAYS

MakeOutcome = Callable[..., Outcome]


@pytest.fixture
def run(tmp_path: Path, make_outcome: MakeOutcome, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a run of one cell, with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with open_for_writing(Run(tmp_path / "run")) as writer:
        writer.append(make_outcome(), None)
    return Run(tmp_path / "run")


def cached_files() -> list[Path]:
    return sorted(frame_cache._path("").iterdir())


def test_an_unchanged_run_is_derived_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    derived = load_results(run)
    monkeypatch.setattr(results, "derive_cells", None)
    cached = load_results(run)
    pd.testing.assert_frame_equal(cached.cells, derived.cells, check_exact=True)
    assert (cached.axes, cached.manifest) == (derived.axes, derived.manifest)
    assert cached.cells_without_samples == derived.cells_without_samples == 0


def test_another_attempt_or_default_is_another_key(run: Run, make_outcome: MakeOutcome) -> None:
    keys = [cells_key(run, False)]
    assert cells_key(run, True) == keys[0]  # there is one version
    with open_for_writing(run) as writer:
        writer.write_manifest({"name": "test", "defaults": {"train_step": {"seed": 1}}})
        keys.append(cells_key(run, False))
        writer.append(make_outcome(context_length=32), None)
    keys.append(cells_key(run, False))
    assert len(set(keys)) == 3
    assert len(load_results(run).cells) == 2


@pytest.mark.parametrize("content", [b"", b"half of a file", None])
def test_a_file_that_cannot_be_used_costs_only_time(run: Run, content: bytes | None) -> None:
    derived = load_results(run)
    (file,) = cached_files()
    file.unlink()
    if content is None:
        file.mkdir()  # can neither be read nor replaced
    else:
        file.write_bytes(content)
    pd.testing.assert_frame_equal(load_results(run).cells, derived.cells, check_exact=True)


def test_a_damaged_part_is_reported_with_a_warm_cache(run: Run) -> None:
    load_results(run)
    (part,) = (run.folder / "samples").glob("*.parquet")
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    with pytest.raises(RunError, match=part.name):
        load_results(run)


def test_a_sweep_that_writes_meanwhile_leaves_no_cell_without_samples(
    run: Run, make_outcome: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, read = iter(range(100, 200)), Run.read

    def read_while_a_sweep_writes(self: Run, table: str, *more: Any, **how: Any) -> pd.DataFrame:
        found = read(self, table, *more, **how)
        RunWriter(run.folder).append(make_outcome(context_length=next(lengths)), None)
        return found

    monkeypatch.setattr(Run, "read", read_while_a_sweep_writes)
    for load in (load_results, lambda run: load_with_samples(run)[0]):
        results = load(run)
        assert results.cells_without_samples == 0
        assert not results.cells["step_ms_median"].isna().any()


def test_the_oldest_files_are_deleted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_cache, "MOST_FILES", 2)
    for key in "abc":
        frame_cache.write_frame(key, pd.DataFrame({"cell": [key]}), {})
    assert [file.name for file in cached_files()] == ["b", "c"]


def test_the_key_covers_all_code_that_derives_cells() -> None:
    imported = ALLOWED["orchestrator/analysis"] | ALLOWED["tasks/spec"] | ALWAYS["orchestrator"]
    assert set(CODE) == imported | {"orchestrator/analysis"}
