"""Cells of a model that failed are tried again once its source has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.spec.status import Status
from tests.orchestrator.planning.test_prior_results import without_settings
from tests.support.fake_sweep import FakeScheduler, go, outcome_of, request_for

CONFIG = """
name: own
limits: {attempts: 1}
grids:
  - task: train_step
    fixed: {device: cpu, model: "tests.support.misbehaving:Model", context_length: 16}
"""


@pytest.mark.parametrize("status", [Status.FAILED, Status.OOM])
def test_a_cell_is_measured_again_after_its_model_has_changed(
    status: Status,
    write_config: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, messages = write_config(CONFIG), list[str]()

    def measured(source: str, ends: Status) -> int:
        monkeypatch.setattr("orchestrator.planning.request.source_digest", lambda *_: source)
        scheduler = FakeScheduler(lambda attempt: outcome_of(attempt, ends))
        go(request_for(config, out=tmp_path / "run"), scheduler, messages=messages)
        return len(scheduler.begun)

    assert measured("first", status) == 1
    assert measured("first", status) == 0
    assert without_settings(messages) == []
    assert measured("second", Status.OK) == 1
    assert without_settings(messages) == [
        "1 cell failed with another source of the model; measured again"
    ]
    assert measured("third", status) == 0  # a success stays
