"""The transcribed numbers hold what their tables promise each other, so that a wrong digit or a shifted column shows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise

import pytest

from model.accounting import parameter_count
from model.config import SIZES
from orchestrator.common.reference_devices import DEVICES
from orchestrator.report.references.records import ReferenceNumber, published, writeups
from tasks.spec.registry import all_tasks

NUMBERS = published()


def of(writeup: str, table: str) -> list[ReferenceNumber]:
    found = [number for number in NUMBERS if (number.writeup, number.table) == (writeup, table)]
    assert found, (writeup, table)
    return found


def rows(writeup: str, *tables: str) -> Iterator[dict[tuple[str, str, str], float]]:
    """Amounts of a row by metric, phase and statistic, of the rows without an OOM; by pass where a row has several."""
    for table in tables:
        by_row: dict[int, list[ReferenceNumber]] = defaultdict(list)
        for number in of(writeup, table):
            by_row[number.row].append(number)
        for numbers in by_row.values():
            if all(number.amount is not None for number in numbers):
                yield {
                    (number.metric, number.phase, number.statistic): float(number.amount or 0.0)
                    for number in numbers
                }


def test_nothing_is_lost() -> None:
    assert Counter(number.writeup for number in NUMBERS) == {
        "analysis report": 1049,
        "answer.md": 491,
        "assignment report": 1004,
        "ShibukiZero": 24 + 5 + 4 + 12 + 8 + 6,
        "damek": 8 + 3 * (6 + 6 + 24) + 2 * 6,
        "section 1.2": 200,
        "torchtitan": 4,
        "writeup.tex": 12 + 9 + 4,
        "yyin-dev": 570,
    }
    assert {number.device for number in NUMBERS} == set(DEVICES)


def test_each_number_names_a_cell_that_our_tasks_could_measure() -> None:
    """Whatever the write-up leaves open: each axis is one of the task's, and each value one that it takes."""
    said = {
        (number.task, axis, value)
        for number in NUMBERS
        for axis, values in number.axes.items()
        for value in values
    }
    for task, axis, value in said:
        others: dict[str, object] = {"size": "small"} if task == "train_step" else {}
        if task == "collectives":
            others = {"device": "cpu" if axis == "processes" else "cuda", "gpus": 2}
        elif axis in ("gpus", "parallel", "bucket_mb", "batch"):
            others |= {"device": "cuda", "gpus": 2, "parallel": "bucketed", "batch_size": 8}
        made = all_tasks()[task].params.model_validate(
            {**others, axis: value}, by_alias=True, by_name=True
        )
        assert made.values()[axis] == value


def test_parameters_are_those_of_the_sizes() -> None:
    told = [number for number in NUMBERS if number.metric == "parameters"]
    assert len(told) == 18 + 18 + 3 * 4 + 3 * 3
    assert all(
        number.amount == parameter_count(SIZES[2025][number.only("size")]) for number in told
    )


@pytest.mark.parametrize("table", ["forward", "backward", "both", "not-matmul", "step"])
def test_launches_of_a_kernel_come_to_its_time(table: str) -> None:
    for row in rows("yyin-dev", f"kernels-{table}"):
        mean, total = (
            next(row[key] for key in row if key[0] == metric and key[2] == "mean")
            for metric in ("kernel_duration", "kernel_time")
        )
        (launches,) = (row[key] for key in row if key[0] == "kernel_launches")
        times = {
            statistic: ms
            for (metric, _, statistic), ms in row.items()
            if metric == "kernel_duration"
        }
        assert mean * launches == pytest.approx(total, rel=6e-4)
        assert times["min"] <= times["median"] <= times["max"]
        assert times["min"] <= mean <= times["max"]


def test_shares_of_kernels_are_of_one_whole() -> None:
    for table in ("kernels-forward", "kernels-backward", "kernels-both", "kernels-step"):
        by_row = [(share, time) for share, time in _shares(table) if share > 0.05]
        wholes = [time / share for share, time in by_row]
        assert max(wholes) / min(wholes) < 1.02, table


def _shares(table: str) -> Iterator[tuple[float, float]]:
    for row in rows("yyin-dev", table):
        (share,) = (row[key] for key in row if key[0] == "kernel_share")
        (time,) = (row[key] for key in row if key[0] == "kernel_time")
        yield share, time


def test_both_passes_are_the_sum_of_each() -> None:
    tables = {
        number.table
        for number in NUMBERS
        if number.writeup == "assignment report"
        and number.table.startswith(("timings", "attention"))
    }
    assert len(tables) == 12
    for row in rows("assignment report", *tables):
        forward, backward, both = (
            row["duration", phase, "mean"] for phase in ("forward", "backward", "step")
        )
        assert forward + backward == pytest.approx(both, rel=2e-5, abs=1e-5), row


def test_memory_added_is_what_is_held_more() -> None:
    for row in rows(
        "assignment report", "attention", "attention-compiled", "attention-compiled-bf16"
    ):
        built, forward, backward = (
            row["held", phase, "mean"] for phase in ("built", "forward", "backward")
        )
        assert forward - built == pytest.approx(row["held_more", "forward", "mean"], rel=2e-3)
        assert backward - forward == pytest.approx(
            row["held_more", "backward", "mean"], rel=2e-3, abs=6e3
        )


def test_means_and_warm_up_come_to_the_total() -> None:
    """Of fifteen steps, the warm-up among them."""
    by_cell: dict[object, dict[str, float]] = defaultdict(dict)
    for number in of("analysis report", "timings"):
        if number.amount is not None and number.statistic == "mean":
            steps = 15 - number.only("warmup_steps")
            by_cell[number.row, number.axes["pass"]][number.metric] = number.amount * (
                steps if number.metric == "duration" else 1
            )
    assert len(by_cell) == 33 + 27
    for parts in by_cell.values():
        assert parts["duration"] + parts["warmup_total"] == pytest.approx(
            parts["total"], abs=0.8
        )  # of means told to 0.1 ms


@pytest.mark.parametrize("table", ["mixed-forward", "mixed-both", "mixed-scores"])
def test_speed_ups_are_quotients(table: str) -> None:
    numbers = of("analysis report", table)
    for place in {number.row for number in numbers}:
        wide, narrow, gain = (number.amount or 0.0 for number in numbers if number.row == place)
        assert wide / narrow == pytest.approx(gain, abs=0.006, rel=0.5 * 0.01 / narrow)


def test_differences_of_memory_are_differences() -> None:
    numbers = of("analysis report", "memory-compared")
    for place in (0, 1):
        row = [number.amount or 0.0 for number in numbers if number.row == place]
        for wide, narrow, more, share in (row[:4], row[4:]):
            assert narrow - wide == pytest.approx(more, abs=0.011 * 1024**3)
            assert (narrow - wide) / wide == pytest.approx(share, abs=0.001)


def test_softmax_over_matmul_is_a_quotient() -> None:
    times = {
        (n.labels["part"], n.axes["size"], n.axes["context_length"]): n.amount
        for n in of("analysis report", "softmax-matmul")
    }
    quotients = [
        number
        for number in of("analysis report", "softmax-matmul-ratio")
        if number.amount is not None
    ]
    assert len(quotients) == 11
    for number in quotients:
        softmax, matmul = (
            times[part, number.axes["size"], number.axes["context_length"]]
            for part in ("softmax", "matmul")
        )
        assert softmax is not None
        assert matmul is not None
        assert softmax / matmul == pytest.approx(number.amount, abs=0.005)


def test_differences_of_allocations_are_differences() -> None:
    numbers = of("analysis report", "allocations")
    for place in {number.row for number in numbers}:
        wide, narrow, more = (number.amount or 0.0 for number in numbers if number.row == place)
        assert narrow - wide == more


def test_memory_per_pair_is_a_quotient() -> None:
    numbers = of("answer.md", "attention-scaling")
    held = {number.row: number for number in numbers if number.metric == "held"}
    quotients = [number for number in numbers if number.metric == "held_per_pair"]
    assert len(quotients) == 20
    for number in quotients:
        mib, length = held[number.row].value, number.only("context_length")
        assert mib is not None
        assert float(mib) / length**2 * 1e6 == pytest.approx(number.amount, rel=6e-4)


def test_errors_are_those_of_the_sums() -> None:
    numbers = of("answer.md", "accumulation")
    for place in {number.row for number in numbers}:
        total, error = (number for number in numbers if number.row == place)
        exact = total.only("value") * total.only("count")
        assert abs((total.amount or 0.0) - exact) == pytest.approx(error.amount, abs=1e-12)


def test_a_number_repeated_in_another_table_of_a_write_up_is_the_same() -> None:
    """A whole table, or one rounded; and the columns of a table that another repeats."""
    repeated = {
        (writeup["name"], table["name"]): table["repeats"]
        for writeup in writeups()
        for table in writeup["table"]
        if "repeats" in table
    }
    assert len(repeated) == 7
    for (writeup, name), original in repeated.items():
        first = {_what(number): number.amount for number in of(writeup, str(original))}
        again = [number for number in of(writeup, name) if _what(number) in first]
        assert again, name
        for number in again:
            assert number.amount == pytest.approx(first[_what(number)], abs=6e-4), (
                number
            )  # told to a microsecond


def _what(number: ReferenceNumber) -> object:
    return number.metric, number.phase, number.statistic, frozenset(number.axes.items())


def test_the_h100_repeats_its_eager_attention() -> None:
    first = {_what(number): number.value for number in of("yyin-dev", "attention")}
    again = [
        number
        for number in of("yyin-dev", "attention-compiled")
        if number.only("compile") == "eager"
    ]
    assert len(again) == len(first) == 60
    assert all(number.value == first[_what(number)] for number in again)


def test_memory_of_attention_is_at_least_its_squares() -> None:
    """Two of fp32 wait for the backward pass, one where softmax keeps no other; whoever printed it."""
    held = [
        n
        for n in NUMBERS
        if n.metric == "held"
        and n.phase == "forward"
        and n.only("attention") == "naive"
        and n.amount
    ]
    assert len(held) == 20 + 20 + 20 + 20 + 20 + 20 + 20
    for number in held:
        square = number.only("batch_size") * number.only("context_length") ** 2 * 4
        assert (number.amount or 0.0) >= square
        if number.only("context_length") == 16384:
            assert (number.amount or 0.0) / square < 3.2


def test_attention_grows_with_the_square_of_the_length() -> None:
    """From table to table, where it is long enough to be more than overhead: a shifted row would not."""
    groups: dict[object, list[tuple[int, float]]] = defaultdict(list)
    for number in NUMBERS:
        length = number.only("context_length") or 0
        told = (number.task, number.metric, number.statistic, number.only("attention")) == (
            "attention",
            "duration",
            "mean",
            "naive",
        )
        if told and length >= 4096:
            others = frozenset(
                (axis, values) for axis, values in number.axes.items() if axis != "context_length"
            )
            groups[number.writeup, number.table, number.phase, number.variant, others].append(
                (length, number.amount or 0.0)
            )
    assert len(groups) == (2 + 6) * 4 + 2 * 4 + 2 * 4 + 2 * 2 * 4
    for key, times in groups.items():
        growth = [later / earlier for (_, earlier), (_, later) in pairwise(sorted(times))]
        assert all(3.0 < one < 4.6 for one in growth), (key, growth)


@pytest.mark.parametrize(
    ("writeup", "tables", "digit"),
    [
        ("damek", ("naive", "overlap", "buckets"), 1.2e-4),
        ("ShibukiZero", ("strategies-earlier",), 1e-5),
        ("writeup.tex", ("strategies",), 1e-3),
    ],
)
def test_shares_of_communication_are_quotients(
    writeup: str, tables: tuple[str, ...], digit: float
) -> None:
    checked = list(rows(writeup, *tables))
    assert checked
    for row in checked:
        share = row["communication_share", "step", "mean"]
        quotient = row["duration", "communication", "mean"] / row["duration", "step", "mean"]
        assert quotient == pytest.approx(share, abs=digit), row


@pytest.mark.parametrize("writeup", ["damek", "ShibukiZero", "writeup.tex"])
def test_larger_messages_take_longer(writeup: str) -> None:
    calls = [one for one in of(writeup, "all-reduce") if one.metric == "call"]
    for smaller, larger in pairwise(calls):
        if smaller.axes["gpus"] == larger.axes["gpus"]:
            assert smaller.axes["size_mb"] < larger.axes["size_mb"]
            assert float(smaller.amount or 0) < float(larger.amount or 0)
