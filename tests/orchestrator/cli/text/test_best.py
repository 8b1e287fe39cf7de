"""The sentences of `sweep best`, about speeds that a test decides."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.analysis.fastest import Speed
from orchestrator.cli.text.best import config_text, describe_best
from orchestrator.config.selection import Selection
from orchestrator.planning.request import SweepRequest, resolve
from orchestrator.report.formats.terminal import Screen
from orchestrator.sweep.best_groups import Goal, make_groups
from orchestrator.sweep.best_search import BestFound, BestSearch
from tests.conftest import ROOT

WHERE: dict[str, Sequence[object]] = {
    "size": ["small"],
    "context_length": [128],
    "pass": ["train_step"],
}


def searched(
    steps: Mapping[str, Speed], confirm: int = 0, until: float = math.inf, **changes: object
) -> tuple[SweepRequest, BestFound, Goal]:
    """Return a search of one group, of the candidates with these steps.

    until: infinite: the search has ended.
    """
    request = resolve(ROOT / "configs" / "full.yaml", Selection(where=WHERE), Path("run"))
    goal = Goal(("precision", "compile"), confirm=confirm, until=until)
    group = make_groups(request.expansion.cells, goal)[0]
    entrants = []
    for one in group.entrants:
        speed = steps.get(" ".join(map(str, one.options.values())))
        known = {"speed": speed, "status": "ok" if speed else "pending", **changes}
        entrants.append(replace(one, **known))  # type: ignore[arg-type]
    groups = (replace(group, entrants=tuple(entrants)),)
    end = BestSearch(groups, goal).next(0).reason
    return request, BestFound(groups, (end,), None), goal


def sentences(steps: Mapping[str, Speed], *options: float, **changes: Any) -> list[str]:
    """Return the table of a group and the lines below it."""
    text = "\n".join(describe_best(*searched(steps, *options, **changes), Screen(200)))  # type: ignore[arg-type]
    return text.splitlines()


def step(step_s: float, low_s: float, high_s: float, peak_bytes: float | None = None) -> Speed:
    return Speed(step_s, low_s, high_s, False, peak_bytes, wall_s=10.0)


def test_the_best_and_what_its_options_add() -> None:
    lines = sentences(
        {
            "fp32 eager": step(1.0, 0.9, 1.1, 4 * 2**30),
            "bf16 eager": step(0.5, 0.5, 0.5, 3 * 2**30),
            "bf16 blocks": step(0.25, 0.2, 0.3, 3.5 * 2**30),
        },
        until=0.01,
    )
    for line in (
        "best: precision=bf16 compile=blocks: 4.00× [3.00×, 5.50×] as fast as the default, "
        "precision=fp32 compile=eager",
        "compile=blocks instead of eager: 2.00× as fast",
        "less memory, and slower: precision=bf16 compile=eager (3.00 GiB)",
        "precision=bf16: trains with other numbers than the default. Only the speed was measured, "
        "not the loss",
        "measured 3 of 6 candidates",
    ):
        assert line in lines
    assert lines[-3] == "its parameters and measurements:"
    assert lines[-2].startswith("  sweep show run ")
    assert re.fullmatch(
        r"not finished: 3 of 6 candidates may be measured; next: precision=\w+ compile=\w+",
        lines[-1],
    )


def test_a_difference_that_may_be_noise_is_named() -> None:
    lines = sentences({"fp32 eager": step(1.0, 0.4, 3.0), "bf16 eager": step(0.5, 0.4, 0.9)})
    assert (
        "best: the default, precision=fp32 compile=eager. precision=bf16 compile=eager took 50 % of "
        "its time, which is not surely faster: their intervals overlap"
    ) in lines
    assert (
        "to decide it: --confirm 3 measures both 3 more times, which takes about 1 min 00 s"
        in lines
    )
    # Neither has a peak, and the default gains nothing over others.
    assert not any("memory" in line or "instead of" in line for line in lines)


def test_a_difference_of_processes_is_named() -> None:
    lines = sentences({"fp32 eager": step(1.0, 1.0, 1.0), "bf16 eager": step(0.99, 0.99, 0.99)})
    sentence = next(line for line in lines if line.startswith("best: the default"))
    assert sentence.endswith(
        "took 99 % of its time, which is not surely faster: only less than 98 % is"
    )


def test_what_needs_less_memory_is_slower_than_the_best() -> None:
    steps = {
        "bf16 blocks": step(0.99, 0.99, 0.99, 9e9),
        "fp32 eager": step(1.0, 1.0, 1.0, 8e9),
        "tf32 eager": step(1.1, 1.1, 1.1, 7.99e9),
    }
    assert "less memory, and slower: no measured candidate" in sentences(steps)


def test_no_candidate_fits() -> None:
    lines = sentences({}, verdict="perhaps")
    assert lines[-2:] == [
        "no candidate surely fits. Add --try-perhaps to measure what may fit",
        "a smaller batch_size needs less, and trains with other numbers: add it to --over",
    ]


def test_every_candidate_ran_out_of_memory() -> None:
    lines = sentences({}, status="oom")
    assert "every candidate ran out of memory" in lines
    assert not any("surely fits" in line for line in lines)


def test_too_few_steps_and_a_busy_machine_are_named() -> None:
    few = replace(step(0.5, 0.5, 0.5), coverage=0.5, is_contended=True)
    lines = sentences({"fp32 eager": step(1.0, 1.0, 1.0), "bf16 eager": few})
    sentence = next(line for line in lines if line.startswith("best: the default"))
    assert sentence.endswith("not surely faster: fewer than 6 steps have no interval at 95 %")
    assert (
        "1 of 2 measured candidates ran while other processes used their cores, and their times may "
        "be too long: search again in another folder when the machine is quiet"
    ) in lines


def test_rounds_may_confirm_what_has_too_few_steps_for_an_interval() -> None:
    few = replace(step(0.5, 0.4, 0.6), coverage=0.5, rounds=(0.5, 0.5, 0.51))
    default = replace(step(1.0, 1.0, 1.0), rounds=(1.0, 1.0, 1.01))
    lines = sentences({"fp32 eager": default, "bf16 eager": few})
    assert (
        "best: precision=bf16 compile=eager: 1.99× [1.97×, 2.01×] as fast as the default, "
        "precision=fp32 compile=eager"
    ) in lines


def test_there_is_nothing_to_confirm_if_nothing_is_faster() -> None:
    steps = {"fp32 eager": step(1.0, 1.0, 1.0), "bf16 eager": step(2.0, 2.0, 2.0)}
    line = "nothing to confirm: --confirm measures the default and a faster candidate again"
    assert line in sentences(steps, confirm=3)
    assert line not in sentences(steps)


def test_what_was_measured_alternately_decides() -> None:
    default = replace(step(1.0, 1.0, 1.0), rounds=(1.0, 1.01, 0.99))
    sure = replace(step(0.99, 0.98, 1.2), rounds=(0.9, 0.91, 0.9))
    lines = sentences({"fp32 eager": default, "bf16 eager": sure})
    # The first attempts, 0.99 and 1.0 s, no longer count.
    assert any(line.startswith("best: precision=bf16 compile=eager: 1.11×") for line in lines)
    assert not any("1.01" in line for line in lines)
    assert (
        "measured 3 more times each: precision=bf16 compile=eager takes 90.3 % of the time "
        "of the default, at most 91.2 % with 95 % confidence: confirmed, less than 98 %"
    ) in lines
    unsure = replace(sure, rounds=(0.9, 1.04, 0.9))
    lines = sentences({"fp32 eager": default, "bf16 eager": unsure})
    assert "best: the default, precision=fp32 compile=eager" in lines
    assert (
        "measured 3 more times each: precision=bf16 compile=eager takes 94.4 % of the time "
        "of the default, at most 107 % with 95 % confidence: undecided, because only less than 98 % "
        "is surely faster"
    ) in lines
    assert (
        "to decide it: --confirm 6 measures both 3 more times, which takes about 1 min 00 s"
        in lines
    )
    for rounds, advised in ((60, "--confirm 100 measures both 40 more times"), (100, "")):
        often = replace(unsure, rounds=(0.7, 1.3) * (rounds // 2))
        steady = replace(default, rounds=(1.0,) * rounds)
        found = sentences({"fp32 eager": steady, "bf16 eager": often})
        assert any("undecided" in line for line in found)
        advice = [line for line in found if line.startswith("to decide it:")]
        assert [advised in line for line in advice] == ([True] if advised else [])
    noisy = replace(sure, rounds=(0.5, 2.0, 1.8))
    lines = sentences({"fp32 eager": default, "bf16 eager": noisy})
    assert any("takes 122 % of the time" in line and "undecided" in line for line in lines)
    wild = replace(sure, rounds=(0.01, 3.0, 0.01))
    lines = sentences({"fp32 eager": default, "bf16 eager": wild})
    assert any("at most 1,700 % with" in line for line in lines)
    slow = replace(sure, rounds=(1.03, 1.03, 1.02))
    lines = sentences({"fp32 eager": default, "bf16 eager": slow})
    assert any(line.endswith("confidence: not less than 98 %") for line in lines)
    assert not any(line.startswith("to decide it") for line in lines)


NOISY = {
    "fp32 eager": Speed(1.0, 0.99, 1.01, True, None, wall_s=10.0),
    "bf16 eager": Speed(0.99, 0.98, 1.0, True, None, wall_s=10.0),
    "tf32 eager": Speed(0.995, 0.98, 1.0, True, None, wall_s=10.0),
}


def with_rounds(*rounds: tuple[float, ...]) -> dict[str, Speed]:
    """Return the same steps, with rounds of the default and of the fastest candidate."""
    default, fastest = rounds
    return {
        **NOISY,
        "fp32 eager": replace(NOISY["fp32 eager"], rounds=default),
        "bf16 eager": replace(NOISY["bf16 eager"], rounds=fastest),
    }


def test_the_default_that_was_beaten_is_not_named_as_fast() -> None:
    lines = sentences(with_rounds((1.0, 1.01, 0.99), (0.9, 0.91, 0.9)))
    assert any(line.startswith("best: precision=bf16 compile=eager: 1.11×") for line in lines)
    assert "within the noise of this CPU, as fast: precision=tf32 compile=eager" in lines


@pytest.mark.parametrize(
    ("steps", "confirm", "until", "still_open"),
    [
        (NOISY, 0, 0.0, "not finished: 3 of 6 candidates may be measured"),
        (NOISY, 2, math.inf, "not confirmed: 0 of 2 rounds were measured"),
        (
            with_rounds((1.0,), (0.9,)),
            2,
            math.inf,
            "not confirmed: 1 of 2 rounds were measured",
        ),
        (
            with_rounds((1.0, 1.0), (0.9, 0.9)),
            3,
            math.inf,
            "not confirmed: 2 of 3 rounds were measured",
        ),
        (NOISY, 0, math.inf, ""),
        (with_rounds((1.0, 1.0), (0.9, 0.9)), 2, math.inf, ""),
    ],
)
def test_what_the_command_has_left_is_the_only_advice_and_a_comment_of_the_config(
    steps: Mapping[str, Speed], confirm: int, until: float, still_open: str
) -> None:
    request, found, goal = searched(steps, confirm, until)
    lines = "\n".join(describe_best(request, found, goal, Screen(200))).splitlines()
    comments = [line for line in config_text(request, found, goal).splitlines() if "#" in line]
    assert len(comments) == (3 if still_open or confirm else 2)
    if still_open:
        assert comments[-1] == f"  # {still_open}"
    elif confirm:
        assert comments[-1].endswith(": confirmed, less than 98 %")
    shown = [line for line in lines if line.startswith(("not finished", "not confirmed"))]
    assert [line.partition(";")[0] for line in shown] == ([still_open] if still_open else [])
    if still_open:
        assert not any("--confirm" in line or "confirmed," in line for line in lines)
