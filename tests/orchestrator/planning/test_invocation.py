"""The commands that a folder has seen: which was the last, as it can be typed again, and what it asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator.planning.invocation import last_choice, last_command, new_invocation
from orchestrator.planning.options import RunOptions
from orchestrator.planning.request import SweepRequest, resolve, resolve_again
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from tests.orchestrator.sweep.test_pipeline import CONFIG, FakeScheduler, go, outcome_of


@pytest.fixture
def request_of(write_config: Callable[..., Path], tmp_path: Path) -> Callable[..., SweepRequest]:
    def make(
        text: str = CONFIG, sets: Sequence[str] = (), wheres: Sequence[str] = (), **more: Any
    ) -> SweepRequest:
        return resolve(write_config(text), sets, wheres, tmp_path / "out", **more)

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


@pytest.mark.parametrize(
    "words",
    [["--repeat", "3"], ["--repeat=5", "--infer-oom", "--verify-inferred=2", "--repeat=3"]],
    ids=" ".join,
)
def test_what_an_older_program_was_asked_for_is_told_by_its_words(
    words: list[str], request_of: Callable[..., SweepRequest]
) -> None:
    go(request_of(), FakeScheduler(outcome_of))
    run = request_of().run
    with open_for_writing(run) as writer:
        writer.write_manifest(
            {
                **run.read_manifest(),
                "invocations": [{"time": "then", "command": ["run", "c.yaml", *words]}],
            }
        )
    more = {"infer_oom": True, "verify": 2} if len(words) > 2 else {}
    assert last_choice(run) == RunOptions(repeat=3, **more)


def test_a_run_that_no_command_line_began_has_one_all_the_same(
    request_of: Callable[..., SweepRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/lib/ipykernel_launcher.py", "-f", "kernel.json"])
    go(request_of(wheres=["context_length=16"]), FakeScheduler(outcome_of))
    run = request_of().run
    assert (
        last_command(run)
        == f"sweep run {request_of().config_path} --where context_length=16 --out {run}"
    )


def test_instruments_beside_those_of_the_config_are_of_the_run(
    request_of: Callable[..., SweepRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/lib/ipykernel_launcher.py", "-f", "kernel.json"])
    request = request_of(instruments=["kernel_time", "timing"])
    assert request.config.instruments == ["timing", "memory", "telemetry", "backend", "kernel_time"]
    go(request, FakeScheduler(outcome_of))
    assert last_command(request.run).endswith(
        f"--instrument kernel_time --instrument timing --out {request.run}"
    )
    again = resolve_again(request.run)
    assert again.config.instruments == request.config.instruments
    assert (
        new_invocation(again, RunOptions(), None)["asks_for"]
        == new_invocation(request, RunOptions(), None)["asks_for"]
    )
    other_order = request_of(instruments=["timing", "kernel_time", "kernel_time"])
    assert (
        new_invocation(other_order, RunOptions(), None)["asks_for"]
        == new_invocation(request, RunOptions(), None)["asks_for"]
    )
    assert (
        new_invocation(request_of(), RunOptions(), None)["asks_for"]
        != new_invocation(request, RunOptions(), None)["asks_for"]
    )


def test_a_choice_is_written_down_and_read_again() -> None:
    choice = RunOptions(
        infer_oom=True,
        verify=2,
        repeat=3,
        retry=frozenset({"oom", "ok"}),
        only=frozenset({"ok"}),
        fresh=True,
    )
    assert RunOptions.from_json(choice.to_json()) == choice


def test_what_a_notebook_asked_for_and_did_not_come_to_the_end_of_is_typed_out(
    request_of: Callable[..., SweepRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/lib/ipykernel_launcher.py", "-f", "kernel.json"])
    monkeypatch.setattr("orchestrator.sweep.pipeline.mark_finished", lambda *_: None)
    choice = RunOptions(
        infer_oom=True, verify=2, repeat=3, retry=frozenset({"oom", "ok"}), fresh=True
    )
    go(request_of(), FakeScheduler(outcome_of), choice)
    options = "--infer-oom --fresh --verify-inferred 2 --repeat 3 --retry ok --retry oom"
    assert (
        last_command(request_of().run)
        == f"sweep run {request_of().config_path} {options} --out {request_of().run}"
    )
