"""Results that an edited config would measure otherwise are reported, or refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.common.errors import RunMismatch
from orchestrator.planning.invocation import Invocation, RunOptions
from orchestrator.planning.prior_results import is_by_other_program
from orchestrator.planning.request import SweepRequest
from orchestrator.store.run import Run
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.source_digest import source_digest
from tasks.spec.status import Status
from tests.support.fake_sweep import CONFIG, FakeScheduler, go, outcome_of, request_for

LATER = CONFIG.replace("[16, 32, 64, 128]", "[16, 32, 64, 128, 256]")
Messages = list[str]
A_AND_B = "source of a of commit a (here source of b of commit b): measure again with `--retry ok`"


def without_settings(messages: Messages) -> Messages:
    """Leave out the line of the settings that all cells share."""
    return [message for message in messages if not message.startswith("all cells: ")]


@pytest.fixture
def measured(
    write_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Messages, list[int]]]:
    """Run a config into the same folder. Return the messages and the measured lengths."""

    def measure(
        text: str,
        commit: str = "a",
        choice: RunOptions | None = None,
        mixed: bool = False,
        source: str | None = None,
    ) -> tuple[Messages, list[int]]:
        monkeypatch.setattr("orchestrator.planning.request.git_commit", lambda: commit)
        digest = source or f"source of {commit.strip('+')}"
        monkeypatch.setattr("orchestrator.planning.request.program_source", lambda: digest)
        request: SweepRequest = request_for(write_config(text), [], [], tmp_path / "out")
        messages: Messages = []
        scheduler = FakeScheduler(outcome_of)
        go(request, scheduler, choice, messages=messages, allow_mixed=mixed)
        lengths = [attempt.cell.params.values()["context_length"] for attempt in scheduler.begun]
        return without_settings(messages), lengths

    return measure


def test_results_without_an_added_instrument_are_reported(
    measured: Callable[..., tuple[Messages, list[int]]],
) -> None:
    assert measured(CONFIG + "instruments: [timing]\n")[0] == []
    with_more = LATER + "instruments: [timing, memory, kernels]\n"
    messages, lengths = measured(with_more)
    assert messages == [
        "4 cells measured earlier without kernels, memory: measure again with `--retry ok`"
    ]
    assert lengths == [256]
    assert measured(with_more, choice=RunOptions(retry=frozenset({Status.OK})))[0] == []
    assert measured(with_more) == ([], [])
    # More instruments than the config has are fine.
    assert measured(CONFIG + "instruments: [timing]\n") == ([], [])


def test_results_of_another_program_are_reported(
    measured: Callable[..., tuple[Messages, list[int]]],
) -> None:
    measured(CONFIG.replace("[16, 32, 64, 128]", "[16]"))
    messages, lengths = measured(CONFIG, "b+")
    assert messages == [
        f"1 cell measured earlier by another program, {A_AND_B.replace('commit b', 'commit b+')}"
    ]
    assert lengths == [32, 64, 128]


@pytest.mark.parametrize(
    ("commit", "source", "programs"),
    [
        ("b", "source of a", []),
        ("a", "changed", ["source of a of commit a (here changed of commit a)"]),
    ],
    ids=["a commit that changes nothing that measures", "changes in the same commit"],
)
def test_a_program_is_identified_by_its_source_and_not_by_its_commit(
    commit: str,
    source: str,
    programs: Messages,
    measured: Callable[..., tuple[Messages, list[int]]],
) -> None:
    measured(NARROW)
    messages, _ = measured(NARROW, commit, source=source)
    assert [line.partition("program, ")[2].partition(": ")[0] for line in messages] == programs


@pytest.mark.parametrize(
    ("stored", "current", "is_other"),
    [("a", "a", False), ("a", "b", True), ("a", None, False), (None, "b", False)],
)
def test_old_results_without_a_source_are_compared_by_commit(
    stored: str | None, current: str | None, is_other: bool
) -> None:
    invocation = Invocation(commit=current, program_source="source")
    assert is_by_other_program(None, stored, invocation) is is_other


def test_another_name_in_the_same_folder_is_reported(
    measured: Callable[..., tuple[Messages, list[int]]],
) -> None:
    assert measured(NARROW)[0] == []
    (message,) = measured(NARROW.replace("name: test", "name: other"))[0]
    assert message.endswith(": has results of another config, test, and they stay in its tables")


def test_repetitions_by_another_program_are_reported(
    measured: Callable[..., tuple[Messages, list[int]]],
) -> None:
    measured(NARROW)
    expected = [f"1 cell measured earlier by another program, {A_AND_B}"]
    assert measured(NARROW, "b", RunOptions(repeat=3)) == (expected, [16, 16])
    assert measured(NARROW, "b", RunOptions(repeat=3)) == (expected, [])


def test_another_environment_is_refused_unless_it_is_allowed(
    measured: Callable[..., tuple[Messages, list[int]]], tmp_path: Path
) -> None:
    measured(CONFIG)
    other = LATER + "env: {OMP_NUM_THREADS: '1', A: b}\n"
    with pytest.raises(
        RunMismatch,
        match=r"other environment variables: none \(here A=b OMP_NUM_THREADS=1\).*--mixed",
    ):
        measured(other)
    messages, lengths = measured(other, mixed=True)
    assert lengths == [256]
    assert messages[0].startswith(
        "4 cells measured earlier with other environment variables: none (here A=b OMP_NUM_THREADS=1)"
    )
    facts = [row[0] for row in Run(tmp_path / "out").rows("attempts", ["facts"])]
    assert sum('"OMP_NUM_THREADS"' in text for text in facts) == 1  # stored in each row
    assert measured(other, choice=RunOptions(retry=frozenset({Status.OK})))[1] == [
        16,
        32,
        64,
        128,
        256,
    ]
    assert measured(other) == ([], [])


def test_cells_measured_again_have_the_new_environment(
    measured: Callable[..., tuple[Messages, list[int]]],
) -> None:
    measured(CONFIG)
    measured(CONFIG + ENV, choice=AGAIN)
    assert measured(LATER + ENV) == ([], [256])
    with pytest.raises(RunMismatch, match=r"other environment variables: A=b \(here none\)"):
        measured(CONFIG.replace("128]", "128, 512]"))


NARROW = CONFIG.replace("[16, 32, 64, 128]", "[16]")
AGAIN = RunOptions(retry=frozenset({Status.OK}))
ENV = "env: {A: b}\n"


@pytest.mark.parametrize(
    ("text", "choice"),
    [(CONFIG.replace("[16, 32, 64, 128]", "[32]"), RunOptions()), (NARROW, RunOptions(repeat=2))],
    ids=["other cells", "a repetition"],
)
def test_another_environment_is_refused_for_other_cells_and_for_repetitions(
    text: str, choice: RunOptions, measured: Callable[..., tuple[Messages, list[int]]]
) -> None:
    measured(NARROW)
    with pytest.raises(RunMismatch, match=r"other environment variables: none \(here A=b\)"):
        measured(text + ENV, choice=choice)
    measured(text, choice=choice)
    assert measured(text + ENV, choice=RunOptions(retry=frozenset({Status.OK})), mixed=True)[1]


def test_an_oom_in_another_environment_is_refused(
    measured: Callable[..., tuple[Messages, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another setting of the allocator, for example, the cell may fit."""
    plain = outcome_of
    monkeypatch.setattr(
        sys.modules[__name__], "outcome_of", lambda attempt: plain(attempt, Status.OOM)
    )
    measured(NARROW)
    monkeypatch.setattr(sys.modules[__name__], "outcome_of", plain)
    with pytest.raises(RunMismatch, match="--retry oom, or add --mixed"):
        measured(CONFIG + ENV)
    assert measured(CONFIG + ENV, choice=RunOptions(retry=frozenset({"oom"})))[1] == [
        16,
        32,
        64,
        128,
    ]


def test_the_folder_of_a_compile_cache_makes_no_other_environment(
    measured: Callable[..., tuple[Messages, list[int]]],
) -> None:
    measured(NARROW + "env: {TORCHINDUCTOR_CACHE_DIR: /before}\n")
    assert measured(CONFIG + "env: {TORCHINDUCTOR_CACHE_DIR: /moved}\n") == ([], [32, 64, 128])


def test_another_source_of_a_users_model_is_reported(
    measured: Callable[..., tuple[Messages, list[int]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = CONFIG.replace("size: tiny", 'model: "own_gpt:GPT"')
    source = tmp_path / "own_gpt.py"
    source.write_text("class GPT: a = 1")

    def of_this_source(
        attempt: Attempt, plain: Callable[[Attempt], Outcome] = outcome_of
    ) -> Outcome:
        return replace(
            plain(attempt), facts={"model_source": source_digest("own_gpt:GPT", [str(tmp_path)])}
        )

    monkeypatch.setattr(sys.modules[__name__], "outcome_of", of_this_source)
    measured(text)
    assert measured(text) == ([], [])
    source.write_text("class GPT: a = 2")
    assert measured(text)[0] == [
        "4 cells measured earlier with another source of own_gpt:GPT:"
        " measure again with `--retry ok`"
    ]
