"""What an edited config does not measure again is said, and what may not stand beside the new is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.common.errors import RunMismatch
from orchestrator.planning.invocation import Invocation
from orchestrator.planning.options import RunOptions
from orchestrator.planning.prior_results import PriorResult
from orchestrator.planning.request import SweepRequest
from orchestrator.store.run import Run
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.source_digest import source_digest
from tasks.spec.status import Status
from tests.support.fake_sweep import CONFIG, FakeScheduler, go, outcome_of, request_for

LATER = CONFIG.replace("[16, 32, 64, 128]", "[16, 32, 64, 128, 256]")
SAID = list[str]
A_AND_B = "source of a of commit a (here source of b of commit b): `--retry ok` measures them again"


@pytest.fixture
def measured(
    write_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[SAID, list[int]]]:
    """Runs a config into the same folder; gives what is said and the lengths of the cells that were measured."""

    def measure(
        text: str,
        commit: str = "a",
        choice: RunOptions | None = None,
        mixed: bool = False,
        source: str | None = None,
    ) -> tuple[SAID, list[int]]:
        monkeypatch.setattr("orchestrator.planning.request.git_commit", lambda: commit)
        digest = source or f"source of {commit.strip('+')}"
        monkeypatch.setattr("orchestrator.planning.request.program_source", lambda: digest)
        request: SweepRequest = request_for(write_config(text), [], [], tmp_path / "out")
        said: SAID = []
        scheduler = FakeScheduler(outcome_of)
        go(request, scheduler, choice, messages=said, allow_mixed=mixed)
        return said, [attempt.cell.params.values()["context_length"] for attempt in scheduler.begun]

    return measure


def test_instruments_that_are_added_are_missed_aloud(
    measured: Callable[..., tuple[SAID, list[int]]],
) -> None:
    assert measured(CONFIG + "instruments: [timing]\n")[0] == []
    with_more = LATER + "instruments: [timing, memory, kernels]\n"
    said, lengths = measured(with_more)
    assert said == [
        "4 cells measured earlier without kernels, memory: `--retry ok` measures them again"
    ]
    assert lengths == [256]
    assert measured(with_more, choice=RunOptions(retry=frozenset({Status.OK})))[0] == []
    assert measured(with_more) == ([], [])
    assert measured(CONFIG + "instruments: [timing]\n") == (
        [],
        [],
    )  # more than is asked for is no lack


def test_another_program_is_said(measured: Callable[..., tuple[SAID, list[int]]]) -> None:
    measured(CONFIG.replace("[16, 32, 64, 128]", "[16]"))
    said, lengths = measured(CONFIG, "b+")
    assert said == [
        f"1 cell measured earlier by another program, {A_AND_B.replace('commit b', 'commit b+')}"
    ]
    assert lengths == [32, 64, 128]


@pytest.mark.parametrize(
    ("commit", "source", "told"),
    [
        ("b", "source of a", []),
        ("a", "changed", ["source of a of commit a (here changed of commit a)"]),
    ],
    ids=["a commit that changes nothing that measures", "changes in the same commit"],
)
def test_a_program_is_what_it_says_whatever_its_commit(
    commit: str, source: str, told: SAID, measured: Callable[..., tuple[SAID, list[int]]]
) -> None:
    measured(NARROW)
    said, _ = measured(NARROW, commit, source=source)
    assert [line.partition("program, ")[2].partition(": ")[0] for line in said] == told


def test_of_what_did_not_write_down_its_source_the_commit_tells() -> None:
    old = PriorResult("a", None, None)
    by_commit = {
        commit: Invocation(None, commit=commit, program_source="source")
        for commit in ("a", "b", None)
    }
    assert [old.is_by_other_program(by_commit[commit]) for commit in ("a", "b", None)] == [
        False,
        True,
        False,
    ]
    assert not PriorResult(None, None, None).is_by_other_program(by_commit["b"])


def test_repetitions_of_another_program_are_said(
    measured: Callable[..., tuple[SAID, list[int]]],
) -> None:
    measured(NARROW)
    told = [f"1 cell measured earlier by another program, {A_AND_B}"]
    assert measured(NARROW, "b", RunOptions(repeat=3)) == (told, [16, 16])
    assert measured(NARROW, "b", RunOptions(repeat=3)) == (told, [])


def test_another_environment_is_refused_unless_asked_for(
    measured: Callable[..., tuple[SAID, list[int]]], tmp_path: Path
) -> None:
    measured(CONFIG)
    other = LATER + "env: {OMP_NUM_THREADS: '1', A: b}\n"
    with pytest.raises(
        RunMismatch,
        match=r"other environment variables: none \(here A=b OMP_NUM_THREADS=1\).*--mixed",
    ):
        measured(other)
    said, lengths = measured(other, mixed=True)
    assert lengths == [256]
    assert said[0].startswith(
        "4 cells measured earlier with other environment variables: none (here A=b OMP_NUM_THREADS=1)"
    )
    facts = [row[0] for row in Run(tmp_path / "out").rows("attempts", ["facts"])]
    assert sum('"OMP_NUM_THREADS"' in text for text in facts) == 1  # each row says for itself
    assert measured(other, choice=RunOptions(retry=frozenset({Status.OK})))[1] == [
        16,
        32,
        64,
        128,
        256,
    ]
    assert measured(other) == ([], [])


def test_what_was_measured_again_in_another_environment_is_of_that(
    measured: Callable[..., tuple[SAID, list[int]]],
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
    [
        (
            CONFIG.replace("[16, 32, 64, 128]", "[32]"),
            RunOptions(),
        ),  # other cells, in the same tables
        (NARROW, RunOptions(repeat=2)),  # another repetition of the same
    ],
    ids=["other cells", "a repetition"],
)
def test_another_environment_is_refused_whatever_is_measured_in_it(
    text: str, choice: RunOptions, measured: Callable[..., tuple[SAID, list[int]]]
) -> None:
    measured(NARROW)
    with pytest.raises(RunMismatch, match=r"other environment variables: none \(here A=b\)"):
        measured(text + ENV, choice=choice)
    measured(text, choice=choice)
    assert measured(text + ENV, choice=RunOptions(retry=frozenset({Status.OK})), mixed=True)[1]


def test_an_out_of_memory_of_another_environment_is_not_kept_in_silence(
    measured: Callable[..., tuple[SAID, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the allocator was told otherwise: it may fit now."""
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


def test_where_a_compiler_keeps_its_cache_is_no_other_environment(
    measured: Callable[..., tuple[SAID, list[int]]],
) -> None:
    measured(NARROW + "env: {TORCHINDUCTOR_CACHE_DIR: /before}\n")
    assert measured(CONFIG + "env: {TORCHINDUCTOR_CACHE_DIR: /moved}\n") == ([], [32, 64, 128])


def test_another_source_of_ones_own_model_is_said(
    measured: Callable[..., tuple[SAID, list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = CONFIG.replace("size: tiny", 'model: "own_gpt:GPT"')
    source = tmp_path / "own_gpt.py"
    source.write_text("a = 1")

    def of_this_source(
        attempt: Attempt, plain: Callable[[Attempt], Outcome] = outcome_of
    ) -> Outcome:
        return replace(
            plain(attempt), facts={"model_source": source_digest("own_gpt:GPT", [str(tmp_path)])}
        )

    monkeypatch.setattr(sys.modules[__name__], "outcome_of", of_this_source)
    measured(text)
    assert measured(text) == ([], [])
    source.write_text("a = 2")
    (said,) = measured(text)[0]
    assert (
        said
        == "4 cells measured earlier with another source of own_gpt:GPT: `--retry ok` measures them again"
    )
