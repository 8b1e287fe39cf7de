"""Changes that make a stored cell fit: the folders in which its model is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.cli.text import changes
from orchestrator.store.layout import MODELS
from tasks.spec.outcome import Outcome
from tasks.spec.registry import make_cell
from tasks.spec.status import Status
from tests.orchestrator.analysis.test_comparison import write


@pytest.mark.parametrize(("task", "more"), [("gone", {}), ("train_step", {"gone": 3})])
def test_nothing_is_predicted_for_a_cell_that_this_version_cannot_make(
    task: str, more: dict[str, int], tmp_path: Path, make_outcome: Callable[..., Outcome]
) -> None:
    failed = make_outcome(Status.OOM, device="cuda")
    values = {**failed.attempt.cell.params.values(), **more}
    cell = SimpleNamespace(
        id="old", task=task, version=1, params=SimpleNamespace(values=lambda: values)
    )
    run = write(tmp_path / "run", replace(failed, attempt=replace(failed.attempt, cell=cell)))
    (line,) = changes.changes_of_stored(run, "old")
    assert line == "cell old: another version measured it, so that no changes can be predicted"


@pytest.mark.parametrize("model", ["hf:mine/small", "mine:Model"])
def test_the_config_of_a_model_of_transformers_is_looked_up_in_the_run(
    model: str,
    tmp_path: Path,
    make_outcome: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[tuple[str, ...]] = []

    def changes_of(cell: Any, label: str, gpu: Any, paths: tuple[str, ...]) -> Iterator[str]:
        found.append(paths)
        yield label

    monkeypatch.setattr(changes, "changes_of", changes_of)
    failed = make_outcome(Status.OOM, device="cuda")
    cell = make_cell("train_step", {"device": "cuda", "model": model, "vocab_size": 100})
    facts = {"gpu": "NVIDIA H100 80GB HBM3", "gpu_memory_bytes": 80 * 2**30}
    own = replace(failed, attempt=replace(failed.attempt, cell=cell), facts=facts)
    run = write(tmp_path / "run", own)
    assert list(changes.changes_of_stored(run, cell.id)) == [f"cell {cell.id}"]
    is_in_run = str(run.folder / MODELS) in found[0]
    assert is_in_run is model.startswith("hf:")
    assert str(Path.cwd()) in found[0]
