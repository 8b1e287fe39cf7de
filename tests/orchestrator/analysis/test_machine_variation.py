"""What other machines make of the same cells: on rows made by hand, in the report and in a comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import Result

from orchestrator.analysis.cell_timing import Side
from orchestrator.analysis.comparison import Noise, judge
from orchestrator.analysis.cpu_bound import Decides, decides
from orchestrator.analysis.machine_variation import (
    IN_ADDITIONS,
    LEAST,
    OF_KERNELS,
    RUN,
    Kind,
    Machines,
    factors,
    of_several_runs,
    pairs,
    within,
    without_machines_of,
)
from orchestrator.analysis.results import Results, load_results
from orchestrator.report.export.redaction import called
from orchestrator.store.open import open_for_writing, open_runs
from orchestrator.store.run import Run
from tasks.spec.outcome import Outcome
from tasks.spec.tables import Sample
from tests.conftest import with_samples

MakeOutcome = Callable[..., Outcome]
Write = Callable[..., Path]
CELLS = LEAST // 2 + 2


def cells(
    times: Mapping[str, list[float | None]], torch: str = "2.11.0", **columns: object
) -> pd.DataFrame:
    """Of each run, its cells' times: all wait for their hosts."""
    return pd.DataFrame(
        [
            {
                "cell": f"{run}:{number:012x}",
                "run": run,
                "gpu": "NVIDIA H200",
                "torch": torch,
                "cuda": "13.0",
            }
            | {
                "step_ms_median": ms,
                "waits_for_host": True,
                "may_wait_for_host": False,
                "host_slack": 1.0,
                **columns,
            }
            for run, own in times.items()
            for number, ms in enumerate(own)
        ]
    )


def test_each_time_is_held_against_that_of_every_other_run() -> None:
    found = pairs(cells({"a": [10.0, 20.0], "b": [11.0, None], "c": [5.0, 20.0]}))
    told = {
        (known, other, round(math.exp(log), 4))
        for known, other, log in zip(found["known"], found["other"], found["ms"], strict=True)
    }
    assert told == {
        ("a", "b", 1.1), ("b", "a", 0.9091), ("a", "c", 0.5), ("c", "a", 2.0), ("b", "c", 0.4545), ("c", "b", 2.2),
        ("a", "c", 1.0), ("c", "a", 1.0),
    }  # fmt: skip
    assert set(found["decides"]) == {Decides.HOST}


@pytest.mark.parametrize("other", [{"torch": "2.13.0"}, {"gpu": "NVIDIA A100"}, {"gpu": None}])
def test_another_gpu_or_torch_tells_nothing_of_machines(other: dict[str, str]) -> None:
    mine, theirs = cells({"a": [10.0]}), cells({"b": [11.0]})
    assert len(pairs(pd.concat([mine, theirs]))) == 2
    assert pairs(pd.concat([mine, theirs.assign(**other)])).empty


def test_runs_that_share_a_gpu_tell_nothing_of_other_machines() -> None:
    mine = cells({"a": [10.0, 20.0], "b": [11.0], "c": [12.0]})
    found = pairs(mine.assign(gpu_uuid=["GPU 1", "GPU 2", "GPU 2", "GPU 3"]))
    assert set(zip(found["known"], found["other"], strict=True)) == {
        ("a", "c"),
        ("c", "a"),
        ("b", "c"),
        ("c", "b"),
    }


def test_a_run_and_what_was_published_of_it_are_of_one_machine() -> None:
    uuid = "ecfaa693-9706-3340-2855-767684b9d5d1"
    mine = cells({"a": [10.0], "published": [10.0], "b": [11.0]})
    mine = mine.assign(gpu_uuid=[uuid, called(uuid), "GPU 3"])
    found = pairs(mine)
    assert set(zip(found["known"], found["other"], strict=True)) == {
        ("a", "b"),
        ("b", "a"),
        ("published", "b"),
        ("b", "published"),
    }
    assert set(without_machines_of(mine, mine[mine["run"] == "a"])["run"]) == {"b"}


def test_each_comparison_is_judged_by_the_machines_or_says_why_it_cannot_be() -> None:
    known, noise = {Kind(Decides.HOST): 1.5, OF_KERNELS: 1.01}, Noise(0.001, 20)

    def told(before: Side, after: Side) -> tuple[bool | None, str]:
        one = judge("", before, after, noise)
        return one.is_within(known), one.untold(known)

    waits = Side(
        (10.0,), 10.0, 10.0, decides=Decides.HOST, made_with=("NVIDIA H200", "2.11.0", "13.0")
    )
    assert told(waits, waits) == (True, "")
    assert told(waits, replace(waits, made_with=("NVIDIA A100", "2.11.0", "13.0"))) == (
        None,
        "their GPU, torch or CUDA differ",
    )
    of_gpu = replace(waits, decides=Decides.GPU)
    assert told(of_gpu, waits) == (None, "the other runs have too few times where GPU-bound")
    assert told(replace(waits, decides=None), waits) == (
        None,
        "A does not tell whether it is CPU-bound",
    )
    assert told(replace(waits, decides=None, is_of_kernels=True), waits) == (True, "")


def test_one_run_alone_tells_nothing_of_machines() -> None:
    assert pairs(cells({"a": [10.0, 20.0]})).empty
    assert pairs(cells({"a": [10.0]}).drop(columns="run")).empty
    assert pairs(
        cells(
            {"a": [10.0], "b": [11.0]}, waits_for_host=None, may_wait_for_host=None, host_slack=None
        )
    ).empty


def test_the_factor_holds_ninety_five_in_a_hundred_either_way() -> None:
    slower = [10.0 * (1 + number / 100) for number in range(100)]  # 1.00, 1.01, … 1.99 times
    known = factors(pairs(cells({"a": [10.0] * 100, "b": slower})))
    assert known == {Kind(Decides.HOST): pytest.approx(1.94, abs=0.01)}
    assert [within(ratio, Kind(Decides.HOST), known) for ratio in (1.9, 1 / 1.9, 2.0, 1 / 2.0)] == [
        True,
        True,
        False,
        False,
    ]
    assert within(1.0, Kind(Decides.GPU), known) is None
    side = Side((10.0,), 9.9, 10.1)
    assert (
        judge("", side, side, Noise(0.001, 20)).is_within(known) is None
    )  # whose time it is is not known


def test_what_the_host_decides_is_held_against_it_in_additions_too() -> None:
    """Twice as slow a host, and the same work to a tenth; the GPU's own cells are told in ms, whatever is known of them."""
    mine, theirs = (
        cells({"a": [10.0] * LEAST}, step_additions_median=2000.0),
        cells({"b": [20.0] * LEAST}),
    )
    known = factors(pairs(pd.concat([mine, theirs.assign(step_additions_median=2200.0)])))
    assert known == {Kind(Decides.HOST): pytest.approx(2.0), IN_ADDITIONS: pytest.approx(1.1)}
    assert factors(pairs(pd.concat([mine, theirs]))) == {Kind(Decides.HOST): pytest.approx(2.0)}
    of_gpu = pd.concat([mine, theirs.assign(step_additions_median=2200.0)]).assign(
        waits_for_host=False, host_slack=9.0
    )
    assert factors(pairs(of_gpu)) == {Kind(Decides.GPU): pytest.approx(2.0)}


def test_the_table_says_it_in_additions_where_runs_were_told_in_them() -> None:
    both = cells({"a": [10.0] * LEAST, "b": [20.0] * LEAST, "c": [15.0] * LEAST})
    header, _ = Machines().lay_out(Results(both, (RUN,), {}))
    assert not [title for title in header if "additions" in title]
    told = both.assign(step_additions_median=[2000.0] * LEAST + [2200.0] * LEAST + [None] * LEAST)
    header, (whole, *_) = Machines().lay_out(Results(told, (RUN,), {}))
    of_all = dict(zip(header, whole, strict=True))
    assert of_all["CPU-bound (†), in additions: × or ÷"] == "1.100"
    assert of_all["CPU-bound (†), in additions: runs"] == "2"
    assert of_all["CPU-bound (†): runs"] == "3"


def test_kernels_are_held_against_each_other_whoever_decides() -> None:
    mine, theirs = cells({"a": [10.0] * LEAST}), cells({"b": [20.0] * LEAST})
    told = pd.concat(
        [
            mine.assign(step_kernel_time_ms_median=5.0),
            theirs.assign(step_kernel_time_ms_median=5.05),
        ]
    )
    ahead = {"waits_for_host": [True, False] * LEAST, "host_slack": [1.0, 9.0] * LEAST}
    assert factors(pairs(told.assign(**ahead))) == {
        Kind(Decides.HOST): pytest.approx(2.0),
        Kind(Decides.GPU): pytest.approx(2.0),
        OF_KERNELS: pytest.approx(1.01),
    }
    nobody_knows = {"waits_for_host": None, "may_wait_for_host": None, "host_slack": None}
    assert factors(pairs(told.assign(**nobody_knows))) == {OF_KERNELS: pytest.approx(1.01)}
    known = factors(pairs(told.drop(columns="step_ms_median")))
    assert known == {OF_KERNELS: pytest.approx(1.01)}
    sides = [Side((ms,), ms, ms, is_of_kernels=True) for ms in (5.0, 5.04, 5.06)]
    assert [judge("", sides[0], side, Noise(0.001, 20)).is_within(known) for side in sides] == [
        True,
        True,
        False,
    ]
    assert len(of_several_runs(told.drop(columns="step_ms_median"))) == 2 * LEAST
    header, (whole, *_) = Machines().lay_out(Results(told, (RUN,), {}))
    of_all = dict(zip(header, whole, strict=True))
    assert (of_all["kernels alone: × or ÷"], of_all["kernels alone: runs"]) == ("1.010", "2")


def test_of_few_pairs_nothing_is_said() -> None:
    enough = LEAST // 2  # each is two pairs
    assert factors(pairs(cells({"a": [10.0] * enough, "b": [11.0] * enough})))
    assert not factors(pairs(cells({"a": [10.0] * (enough - 1), "b": [11.0] * (enough - 1)})))


def test_what_decides_a_time() -> None:
    columns = {
        "waits_for_host": [True, False, False, None],
        "may_wait_for_host": [False, True, False, None],
    }
    frame = pd.DataFrame({**columns, "host_slack": [1.0, 2.0, 3.0, None]})
    assert decides(frame).tolist() == [Decides.HOST, Decides.SLOWER_HOST, Decides.GPU, None]
    assert decides(pd.DataFrame({"cell": ["a"]})).tolist() == [None]


def waiting(
    outcome: Outcome,
    ms: float,
    lead: float | None = 0.1,
    gpu: str = "NVIDIA H200",
    gpu_uuid: str | None = None,
) -> Outcome:
    timing = {"duration": ms, "lead": lead}
    added = [
        Sample("timing", name, "ms", value, "pipelined", "step", 0)
        for name, value in timing.items()
        if value is not None
    ]
    facts = {**outcome.facts, "gpu": gpu, "gpu_uuid": gpu_uuid, "torch": "2.11.0", "cuda": "13.0"}
    return replace(outcome, samples=(*outcome.samples, *added), facts=facts)


@pytest.fixture
def write(tmp_path: Path, make_outcome: MakeOutcome) -> Write:
    def written(name: str, times: list[float], **of: Any) -> Path:
        with open_for_writing(Run(tmp_path / name)) as writer:
            writer.write_manifest({"name": name})
            for number, ms in enumerate(times):
                writer.append(waiting(make_outcome(batch_size=number + 1), ms, **of), None)
        return tmp_path / name

    return written


@pytest.fixture
def runs(write: Write) -> list[Path]:
    """Of a, b and c one takes up to 1.3 times as long as another; d is the half of a, or less."""
    times = [10.0 * (1 + 0.01 * number) for number in range(CELLS)]
    scales = {"a": 1.0, "b": 1.3, "c": 1.1, "d": 0.5}
    return [write(name, [ms * scale for ms in times]) for name, scale in scales.items()]


def test_a_run_is_held_against_what_the_others_differ_by(runs: list[Path]) -> None:
    header, rows = Machines().lay_out(load_results(open_runs(runs)))
    assert header[7:] == [
        "CPU-bound (†): × or ÷",
        "CPU-bound (†): runs",
        "CPU-bound (†): pairs within",
    ]
    assert len(set(header)) == len(header)
    last = {row[0]: row[7:] for row in rows}
    assert last["all"] == ["2.600", "4", "–"]
    assert last["d"] == [
        "1.300",
        "3",
        f"0 of {3 * CELLS}",
    ]  # each of its cells with that of three runs
    assert last["a"] == ["2.600", "3", f"{3 * CELLS} of {3 * CELLS}"]
    assert {text for row in rows for text in row[1:7]} == {"–"}


def test_the_runs_that_a_factor_is_from_are_those_with_such_pairs() -> None:
    mine = cells({"a": [10.0] * LEAST, "b": [11.0] * LEAST, "c": [12.0]})
    ahead = {"waits_for_host": False, "may_wait_for_host": False, "host_slack": 9.0}
    both = pd.concat(
        [mine.assign(cell=mine["cell"] + "0"), mine[mine["run"] != "c"].assign(**ahead)],
        ignore_index=True,
    )
    header, (whole, *_) = Machines().lay_out(Results(both, (RUN,), {}))
    told = dict(zip(header, whole, strict=True))
    assert told["GPU-bound: runs"] == "2"
    assert told["CPU-bound (†): runs"] == "3"


def test_the_table_is_that_of_the_cells_as_they_are_written(
    runs: list[Path], tmp_path: Path
) -> None:
    results = load_results(open_runs(runs))
    with open_for_writing(Run(tmp_path / "all")) as writer:
        writer.write_cells(results.cells)
    written = replace(results, cells=pd.read_parquet(tmp_path / "all" / "cells.parquet"))
    assert Machines().lay_out(written) == Machines().lay_out(results)


def test_the_report_says_it_of_several_runs_alone(
    runs: list[Path], sweep_here: Callable[..., Result]
) -> None:
    done = sweep_here("report", *runs, "--table", "machines")
    assert done.exit_code == 0
    assert f"0 of {3 * CELLS}" in done.stdout
    assert (
        "no cell of these is for machines"
        in sweep_here("report", runs[0], "--table", "machines").stdout
    )


def test_a_comparison_says_whether_it_may_be_another_machine(
    runs: list[Path], sweep_here: Callable[..., Result]
) -> None:
    a, b, c, d = runs
    last = sweep_here("compare", a, c, "--machines", b).stdout.splitlines()[-1]
    assert (
        last
        == f"{CELLS} of {CELLS} are as near as 95% of the other runs are to each other: × or ÷ 1.300 where CPU-bound (†)"
    )
    assert (
        sweep_here("compare", a, d, "--machines", b, "--machines", c)
        .stdout.splitlines()[-1]
        .startswith(f"0 of {CELLS} are")
    )


def test_what_waits_for_its_host_is_as_near_as_in_additions(
    tmp_path: Path, make_outcome: MakeOutcome, sweep_here: Callable[..., Result]
) -> None:
    """Hosts that differ by two, and work that differs by a tenth: of what takes half as much again no such host tells."""

    def write(name: str, ms: float, additions: float) -> Path:
        with open_for_writing(Run(tmp_path / name)) as writer:
            writer.write_manifest({"name": name})
            for number in range(CELLS):
                outcome = waiting(make_outcome(batch_size=number + 1), ms)
                told = Sample("timing", "additions", "", additions, "synced", "step", 0)
                writer.append(with_samples(outcome, told), None)
        return tmp_path / name

    a, b, c, d = (
        write(*own)
        for own in (
            ("a", 10.0, 2000.0),
            ("b", 20.0, 2200.0),
            ("c", 15.0, 2100.0),
            ("d", 15.0, 3000.0),
        )
    )
    *_, alike, near = sweep_here("compare", a, c, "--machines", b).stdout.splitlines()
    assert (
        alike
        == f"in additions (docs/measuring.md), which depend less on the CPU, 0 of {CELLS} CPU-bound cells agree"
    )  # one step each: no interval
    factors_said = "× or ÷ 1.100 where CPU-bound (†), in additions"
    assert (
        near
        == f"{CELLS} of {CELLS} are as near as 95% of the other runs are to each other: {factors_said}"
    )
    assert (
        sweep_here("compare", a, d, "--machines", b)
        .stdout.splitlines()[-1]
        .startswith(f"0 of {CELLS} are")
    )


def test_runs_that_tell_nothing_of_machines_are_said_so(
    runs: list[Path], sweep_here: Callable[..., Result]
) -> None:
    a, _, _, d = runs
    assert (
        sweep_here("compare", a, d, "--machines", d)
        .stdout.splitlines()[-1]
        .startswith("--machines: those runs and A have too few")
    )


def test_a_comparison_says_of_how_many_cells_the_machines_tell_nothing_and_why(
    runs: list[Path], write: Write, sweep_here: Callable[..., Result]
) -> None:
    """Nobody knows what decides in one run, another is of another GPU."""
    a, b, c, _ = runs

    def said(*words: object) -> list[str]:
        lines = sweep_here("compare", *words, "--machines", b, "--machines", c).stdout.splitlines()
        return [line for line in lines if "as near as" in line or "--machines" in line]

    unknown = write("unknown", [10.0] * CELLS, lead=None)
    assert said(unknown, a) == [
        f"--machines tells nothing of {CELLS}: A does not tell whether it is CPU-bound"
    ]
    other = write("other", [10.0] * CELLS, gpu="NVIDIA A100")
    assert said(other, a) == [
        f"--machines tells nothing of {CELLS}: their GPU, torch or CUDA differ"
    ]
    alike = write("alike", [10.0] * CELLS)
    (alone,) = said(alike, a)
    assert alone.startswith(f"{CELLS} of {CELLS} are as near")


def test_what_those_of_one_gpu_differ_by_is_not_said_of_another(
    runs: list[Path], write: Write, sweep_here: Callable[..., Result]
) -> None:
    of_h200 = [word for run in runs for word in ("--machines", run)]
    one, other = (write(name, [10.0] * CELLS, gpu="NVIDIA A100") for name in ("one", "other"))
    last = sweep_here("compare", one, other, *of_h200).stdout.splitlines()[-1]
    assert last.startswith("--machines: those runs and A have too few")


def test_a_run_says_nothing_of_another_machine_beside_one_of_its_own(
    runs: list[Path], write: Write, sweep_here: Callable[..., Result]
) -> None:
    """Beside itself, or beside a run that has a GPU of it, under the name that this has where it is published."""
    a, b, c, _ = runs
    uuid = "GPU-ecfaa693-9706-3340-2855-767684b9d5d1"
    mine, theirs = (
        write("mine", [10.0] * CELLS, gpu_uuid=uuid),
        write("theirs", [10.0] * CELLS, gpu_uuid=called(uuid)),
    )
    other = write("other", [10.0] * CELLS, gpu_uuid="GPU-8e778eff")
    (cell, *_) = load_results(Run(a)).cells["cell"]

    def said(*two: object) -> list[str]:
        lines = sweep_here("compare", *two, "--machines", b, "--machines", c).stdout.splitlines()
        return [line for line in lines if "as near as" in line or "--machines" in line]

    for two in ((a, a), (f"{a}:{cell}", f"{a}:{cell}"), (mine, theirs)):
        assert said(*two) == [
            "--machines tells nothing of another machine: A and B were measured on the same one"
        ]
    (near,) = said(mine, other)
    assert near.startswith(f"{CELLS} of {CELLS} are as near")


def test_what_is_compared_does_not_say_what_others_differ_by(
    runs: list[Path], sweep_here: Callable[..., Result]
) -> None:
    a, b, c, d = runs
    alone = sweep_here("compare", a, d, "--machines", b, "--machines", c).stdout
    assert (
        sweep_here(
            "compare", a, d, *(word for run in (a, b, c, d) for word in ("--machines", run))
        ).stdout
        == alone
    )
