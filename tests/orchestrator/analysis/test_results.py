"""Tests of derived cells in cells.parquet: as good as derived ones, and never outdated."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from orchestrator.analysis import results
from orchestrator.analysis.results import CODE, cells_key, load_results, load_with_samples
from orchestrator.common.errors import RunError
from orchestrator.common.user_cache import read_cached, write_cached
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from orchestrator.store.run_writer import RunWriter
from orchestrator.store.tables import read_cells_file, write_cells_file
from orchestrator.sweep.outcome_log import store_cells
from tasks.spec.outcome import Outcome
from tests.test_architecture import ALLOWED, ALWAYS

MakeOutcome = Callable[..., Outcome]


@pytest.fixture
def run(tmp_path: Path, make_outcome: MakeOutcome) -> Run:
    """Return a run of one cell with its cells.parquet."""
    with open_for_writing(Run(tmp_path / "run")) as writer:
        writer.append(make_outcome(), None)
        store_cells(writer)
    return Run(tmp_path / "run")


def test_an_unchanged_run_is_derived_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    cells_file = run.folder / "cells.parquet"
    content = cells_file.read_bytes()
    cells_file.unlink()
    derived = load_results(run)
    cells_file.write_bytes(content)
    monkeypatch.setattr(results, "derive_cells", None)
    cached = load_results(run)
    pd.testing.assert_frame_equal(cached.cells, derived.cells, check_exact=True)
    assert (cached.axes, cached.manifest) == (derived.axes, derived.manifest)
    assert cached.cells_without_samples == derived.cells_without_samples == 0


def test_cells_without_a_usable_file_are_derived_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cells of a published run, or of one that an older program measured, have no such file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(results, "read_cached", read_cached)
    monkeypatch.setattr(results, "write_cached", write_cached)
    stored = load_results(run).cells
    cells_file = run.folder / "cells.parquet"
    cells_file.unlink()
    calls, derive = [], results.derive_cells
    monkeypatch.setattr(results, "derive_cells", lambda *them: calls.append(1) or derive(*them))
    for harm in (None, None, lambda text: text[:-9], lambda text: text.replace(b"PAR1", b"PAR2")):
        for file in (tmp_path / "cache").rglob("cells/*"):
            file.write_bytes(harm(file.read_bytes()) if harm else file.read_bytes())
        cells = load_results(run).cells
        pd.testing.assert_frame_equal(cells, stored, check_exact=True)
    assert len(calls) == 3  # the first time, and after each harm
    with open_for_writing(run) as writer:  # a driver does not take the cache for the file
        store_cells(writer)
    pd.testing.assert_frame_equal(pd.read_parquet(cells_file), stored, check_exact=True)


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
    file = run.folder / "cells.parquet"
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    pd.testing.assert_frame_equal(load_results(run).cells, derived.cells, check_exact=True)


def test_a_file_with_other_cells_is_not_used(run: Run) -> None:
    derived, key = load_results(run), cells_key(run, False)
    digest = write_cells_file(run.folder, derived.cells.assign(step_ms_median=1.0), key, {})
    assert read_cells_file(run.folder, digest, "another") is None
    pd.testing.assert_frame_equal(load_results(run).cells, derived.cells, check_exact=True)


def test_cells_are_not_derived_again_in_a_copy_of_the_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    derived = load_results(run)
    copy = Run(Path(shutil.copytree(run.folder, tmp_path / "copy")))
    monkeypatch.setattr(results, "derive_cells", None)
    pd.testing.assert_frame_equal(load_results(copy).cells, derived.cells, check_exact=True)


def test_a_damaged_file_is_noticed_although_cells_were_derived(run: Run) -> None:
    load_results(run)
    for table in ("samples", "attempts"):
        (file,) = (run.folder / table).glob("*.parquet")
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        if table == "samples":
            assert load_results(run).incomplete
    with pytest.raises(RunError, match=r"attempts/0001\.parquet"):
        load_results(run)


def test_a_sweep_that_writes_meanwhile_leaves_no_cell_without_samples(
    run: Run, make_outcome: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, read = iter(range(100, 200)), Run.read

    def read_while_a_sweep_writes(self: Run, table: str, *more: Any, **how: Any) -> pd.DataFrame:
        found = read(self, table, *more, **how)
        writer = RunWriter(run.folder)
        writer.append(make_outcome(context_length=next(lengths)), None)
        writer.finish()
        return found

    monkeypatch.setattr(Run, "read", read_while_a_sweep_writes)
    for load in (load_results, lambda run: load_with_samples(run)[0]):
        results = load(run)
        assert results.cells_without_samples == 0
        assert not results.cells["step_ms_median"].isna().any()


def test_the_key_covers_all_code_that_derives_cells() -> None:
    imported = ALLOWED["orchestrator/analysis"] | ALLOWED["tasks/spec"] | ALWAYS["orchestrator"]
    assert set(CODE) == imported | {"orchestrator/analysis"}
