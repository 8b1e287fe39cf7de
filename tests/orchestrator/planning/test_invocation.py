"""The commands that a folder has seen: which was the last, as it can be typed again, and what it asked for."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.planning.invocation import Invocation, RunOptions, command_in_copy, last_command
from orchestrator.planning.request import SweepRequest, resolve_again
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from tests.support.fake_sweep import CONFIG, FakeScheduler, go, outcome_of, request_for


@pytest.fixture
def request_of(write_config: Callable[..., Path], tmp_path: Path) -> Callable[..., SweepRequest]:
    def make(
        text: str = CONFIG, sets: Sequence[str] = (), wheres: Sequence[str] = (), **more: Any
    ) -> SweepRequest:
        return request_for(write_config(text), sets, wheres, tmp_path / "out", **more)

    return make


def test_the_status_names_the_command_without_what_it_asked_for_once(
    request_of: Callable[..., SweepRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "run",
        "c.yaml",
        "--retry",
        "ok",
        "--only=oom",
        "--fresh",
        "--set",
        "seed=1",
        "--out",
        "a b",
    ]
    monkeypatch.setattr(sys, "argv", ["sweep", *words])
    go(request_of(), FakeScheduler(outcome_of))
    run = request_of().run
    assert last_command(run) == f"sweep run c.yaml --set seed=1 --out {run}"
    moved = run.folder.rename(run.folder.with_name("a b"))
    assert last_command(Run(moved)) == f"sweep run c.yaml --set seed=1 --out '{moved}'"
    monkeypatch.chdir(run.folder.parent)
    (there := Path("results") / "test").parent.mkdir()
    moved.rename(there)
    assert last_command(Run(there)) == "sweep run c.yaml --set seed=1"


@pytest.mark.parametrize("is_old", [False, True])
def test_options_are_read_from_run_json_and_unknown_keys_are_ignored(
    is_old: bool, request_of: Callable[..., SweepRequest]
) -> None:
    go(request_of(), FakeScheduler(outcome_of))
    run = request_of().run
    stored = {"infer_oom": True, "verify": 2, "repeat": 3, "retry": ["ok", "beside"], "only": []}
    entry = {"time": "then", "command": ["run"], "choice": stored, "skips": True}
    if is_old:
        asked = {"choice": stored, "skips": True}
        entry = {"time": "then", "command": ["run"], "asks_for": asked, "finished": False}
    with open_for_writing(run) as writer:
        writer.write_manifest({**run.read_manifest(), "invocations": [entry]})
    again = resolve_again(run)
    assert again.options == RunOptions(infer_oom=True, repeat=3)
    assert again.execution.skip_predicted_oom


def test_a_finished_command_does_not_measure_again_what_it_measured(
    request_of: Callable[..., SweepRequest],
) -> None:
    again = RunOptions(repeat=3, retry=frozenset({"ok"}), only=frozenset({"ok"}), fresh=True)
    go(request_of(), FakeScheduler(outcome_of), again)
    assert resolve_again(request_of().run).options == RunOptions(repeat=3)


def test_a_run_from_a_notebook_has_the_command_of_its_config(
    request_of: Callable[..., SweepRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/lib/ipykernel_launcher.py", "-f", "kernel.json"])
    go(request_of(), FakeScheduler(outcome_of))
    run = request_of().run
    assert last_command(run) == f"sweep run {request_of().config_path} --out {run}"


def test_further_instruments_are_part_of_the_recorded_command(
    request_of: Callable[..., SweepRequest],
) -> None:
    request = request_of(instruments=["kernel_time", "timing"])
    assert request.config.instruments == ["timing", "memory", "telemetry", "backend", "kernel_time"]
    go(request, FakeScheduler(outcome_of))
    again = resolve_again(request.run)
    assert again.config.instruments == request.config.instruments
    assert again.is_recorded(again.new_invocation())
    assert request.is_recorded(request.new_invocation())
    assert not request_of().is_recorded(request_of().new_invocation())
    assert request.new_invocation().continues(again.new_invocation())
    assert not request_of().new_invocation().continues(request.new_invocation())


def test_an_invocation_is_the_same_after_it_was_stored(
    request_of: Callable[..., SweepRequest],
) -> None:
    options = RunOptions(
        infer_oom=True, repeat=3, retry=frozenset({"oom", "ok"}), only=frozenset({"ok"}), fresh=True
    )
    invocation = replace(request_of(), options=options).new_invocation()
    assert invocation.choice["retry"] == ["ok", "oom"]
    assert invocation.choice["fresh"]
    stored = json.loads(json.dumps(vars(invocation)))
    assert Invocation.from_json({**stored, "unknown": 1}) == invocation


def test_a_hidden_config_is_replaced_by_the_copy_in_the_publication(
    request_of: Callable[..., SweepRequest], tmp_path: Path
) -> None:
    go(request_of(), FakeScheduler(outcome_of))
    run, hidden = request_of().run, "…/c.yaml"
    command = ["run", hidden, "--set", "seed=1", "--time-limit=9m", "--out", "…/out"]
    with open_for_writing(run) as writer:
        manifest = {**run.read_manifest(), "config_path": hidden}
        manifest["invocations"][-1]["command"] = command
        writer.write_manifest(manifest)
    copy = tmp_path / "copy"
    assert command_in_copy(run, copy) == (f"sweep run {copy}/config.yaml --set seed=1 --out {copy}")
