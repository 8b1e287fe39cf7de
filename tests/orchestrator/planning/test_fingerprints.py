"""Results of other hardware or software do not join those of a folder, whatever has become of its run.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from orchestrator.common.errors import RunError, RunMismatch
from orchestrator.planning.request import SweepRequest, resolve_again
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome
from tests.orchestrator.sweep.test_pipeline import request_of
from tests.support.fake_sweep import CPU, FakeScheduler, go, outcome_of

__all__ = ["request_of"]


def told(attempt: Attempt) -> Outcome:
    return replace(outcome_of(attempt), facts={"fingerprint": CPU})


@pytest.fixture
def begun(request_of: Callable[..., SweepRequest]) -> SweepRequest:
    """One of whose cells some are measured, and whose run.json is lost."""
    go(request_of(wheres=["context_length=16|32"]), FakeScheduler(told))
    (request_of().run.folder / "run.json").unlink()
    return request_of()


def test_a_lost_manifest_is_reported_with_its_remedy(begun: SweepRequest) -> None:
    with pytest.raises(
        RunError,
        match=r"its run\.json is gone\. Restore it: `sweep run` with the same config writes it again",
    ):
        begun.run.require()


def test_the_same_config_continues_a_run_and_rewrites_its_lost_manifest(
    begun: SweepRequest,
) -> None:
    scheduler = FakeScheduler(told)
    go(begun, scheduler)
    assert [attempt.cell.params.values()["context_length"] for attempt in scheduler.begun] == [
        64,
        128,
    ]
    assert begun.run.read_manifest()["fingerprints"] == {"cpu": [CPU]}
    assert len(resolve_again(begun.run).expansion.cells) == 4


def test_a_lost_manifest_is_rewritten_even_if_no_cell_is_left_to_measure(
    request_of: Callable[..., SweepRequest], begun: SweepRequest
) -> None:
    scheduler = FakeScheduler(told)
    go(request_of(wheres=["context_length=16|32"]), scheduler)
    assert not scheduler.begun
    assert begun.run.read_manifest()["fingerprints"] == {"cpu": [CPU]}


def test_another_torch_version_is_refused_although_the_manifest_is_lost(
    begun: SweepRequest,
) -> None:
    other = FakeScheduler(told, {**CPU, "torch": "2.11.0"})
    with pytest.raises(RunMismatch, match=r"torch 2\.13\.0 \(here 2\.11\.0\)"):
        go(begun, other)
    assert not begun.run.exists
    go(begun, other, allow_mixed=True)
    assert [mark["torch"] for mark in begun.run.read_manifest()["fingerprints"]["cpu"]] == [
        "2.13.0",
        "2.11.0",
    ]
