"""The loop of a search: what a signal between two cells leaves, and what all steps have measured."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.cli.text.sweep_result import conclude
from orchestrator.config.grid import Expansion
from orchestrator.planning.invocation import RunOptions
from orchestrator.planning.request import SweepRequest
from orchestrator.sweep import pipeline
from orchestrator.sweep.interruption import StopReason
from orchestrator.sweep.outcome_log import SweepResult, store_cells
from orchestrator.sweep.search_loop import run_search
from tasks.spec.status import Status
from tests.support.fake_sweep import (
    CONFIG,
    FakeScheduler,
    fake_runtime,
    lengths_of,
    outcome_of,
    request_for,
)

CONTINUES = "stopped by SIGINT. To continue: sweep best c.yaml"


def interrupt(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def request_of_four(write_config: Callable[..., Path], tmp_path: Path) -> SweepRequest:
    return request_for(write_config(CONFIG), out=tmp_path / "out")


def cell_by_cell(
    request: SweepRequest, before: Callable[[int], None], repeat: int = 1
) -> tuple[SweepResult, FakeScheduler]:
    """Measure a cell per step. before: called before each step, with the number of cells so far."""
    scheduler, cells = FakeScheduler(outcome_of), list(request.expansion.cells)

    def next_step(tried: Collection[str]) -> SweepRequest | None:
        before(len(tried))
        left = [cell for cell in cells if cell.id not in tried]
        if not left:
            return None
        options = RunOptions(repeat=repeat)
        return replace(request, expansion=Expansion((left[0],)), options=options)

    return run_search(request, fake_runtime(scheduler), next_step), scheduler


def test_a_signal_between_two_cells_ends_the_search_with_all_that_was_measured(
    request_of_four: SweepRequest,
) -> None:
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    before = [signal.getsignal(number) for number in signals]
    result, scheduler = cell_by_cell(
        request_of_four, lambda count: interrupt() if count == 2 else None
    )
    assert lengths_of(scheduler) == [16, 32]
    assert scheduler.closed
    assert result.stop_reason is StopReason.SIGINT
    lines, code = conclude(result, "sweep best c.yaml", "")
    folder = request_of_four.run
    assert (lines, code) == ([f"measured 2 cells: 2 ok; results in {folder}", CONTINUES], 130)
    assert [signal.getsignal(number) for number in signals] == before


def test_a_signal_while_a_cell_is_stored_loses_no_count(
    request_of_four: SweepRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> dict[str, set[str]]:
        interrupt()
        return store_cells(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(pipeline, "store_cells", interrupted)
    result, scheduler = cell_by_cell(request_of_four, lambda count: None)
    assert (lengths_of(scheduler), len(result.measured)) == ([16], 1)
    assert result.stop_reason is StopReason.SIGINT


def test_a_signal_before_the_first_cell_measures_nothing(request_of_four: SweepRequest) -> None:
    result, scheduler = cell_by_cell(request_of_four, interrupt)
    assert not scheduler.begun
    lines, code = conclude(result, "sweep best c.yaml", "")
    folder = request_of_four.run
    assert (lines, code) == ([f"measured nothing new; results in {folder}", CONTINUES], 130)


def test_the_result_counts_the_cells_of_all_steps_once(request_of_four: SweepRequest) -> None:
    result, _ = cell_by_cell(request_of_four, lambda count: None, repeat=2)
    assert result.counts == {Status.OK: 8}
    assert result.measured == {cell.id for cell in request_of_four.expansion.cells}
    assert not result.is_cut_short
