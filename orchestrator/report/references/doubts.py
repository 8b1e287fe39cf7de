"""What a published number contradicts: the hardware's limits, the size of the model, or the numbers beside it.

Computed from the numbers and from closed forms, never typed in. What nothing can be said of raises no doubt.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache

from model.accounting import (
    attention_flops,
    attention_matmul_flops,
    forward_flops,
    parameter_count,
    projection_flops,
    square_traffic_bytes,
)
from model.config import SIZES
from orchestrator.hardware.gpu_catalog import bandwidth_gb_s, peak_tflops
from orchestrator.report.references.devices import devices
from orchestrator.report.references.matching import WARM
from orchestrator.report.references.records import Number, published

APART = 1.25  # how many times apart two tables of a write-up may put the same cell: from run to run a few percent are usual
NEAR = 0.9  # of the peak: closer than a whole pass comes, norms and softmax included
_FP32_BYTES, _NARROW_BYTES = 4, 2
_PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "bf16_pure")
# By pass, how many times its parameters a model holds at once in training: with gradients, with AdamW's two moments.
_COPIES = {"forward": 1, "forward_grad": 1, "forward_backward": 2, "train_step": 4}
# By pass, how many times the forward pass's FLOPs a step takes; those of the optimizer are not counted.
_FORWARDS = {"forward": 1, "forward_grad": 1, "forward_backward": 3, "train_step": 3}


def doubts_of(number: Number) -> tuple[str, ...]:
    """Those that were typed in with the table, then those that are computed."""
    return tuple(dict.fromkeys([*number.doubts, *computed_doubts(number)]))


def computed_doubts(number: Number, among: Sequence[Number] | None = None) -> tuple[str, ...]:
    """among: what else was published, if not all that is known."""
    around = _around() if among is None else Around(among)
    return tuple(sentence for check in CHECKS for sentence in check(number, around))


class Around:
    """Numbers, found by the row that they stand in and by the cell that they are of."""

    def __init__(self, numbers: Sequence[Number]) -> None:
        self._rows: dict[object, list[Number]] = defaultdict(list)
        self._cells: dict[object, list[Number]] = defaultdict(list)
        self._lengths: dict[object, list[Number]] = defaultdict(list)
        for number in numbers:
            self._rows[self._row(number)].append(number)
            if number.amount is not None and not number.repeats:
                self._cells[self._cell(number)].append(number)
                self._lengths[self._cell(number, without="context_length")].append(number)

    def of_row(self, number: Number, phase: str, statistic: str) -> float | None:
        """What the same row says of another phase or statistic, in the same unit."""
        wanted = (number.metric, phase, statistic, number.variant)
        for other in self._rows[self._row(number)]:
            told = (other.metric, other.phase, other.statistic, other.variant)
            if told == wanted and _overlap(number, other, without=("pass",)):
                return other.amount
        return None

    def same_cell(self, number: Number) -> list[Number]:
        return [other for other in self._cells[self._cell(number)] if other.table != number.table]

    def other_lengths(self, number: Number) -> list[Number]:
        return [
            other
            for other in self._lengths[self._cell(number, without="context_length")]
            if other.table == number.table
        ]

    def _row(self, number: Number) -> object:
        return number.writeup, number.table, number.row

    def _cell(self, number: Number, without: str = "") -> object:
        """What two tables may know of a cell alike; whether it was warm is asked elsewhere."""
        axes = (
            "size",
            "d_head",
            "context_length",
            "precision",
            "compile",
            "pass",
            "batch_size",
            "projections",
        )
        params = tuple(number.params.get(axis) for axis in axes if axis != without)
        labels = tuple(sorted(number.labels.items()))
        who = (number.writeup, number.device, number.task, number.variant)
        return (*who, number.metric, number.phase, number.statistic, params, labels)


@cache
def _around() -> Around:
    return Around(published())


def implied_tflops(number: Number) -> float | None:
    """TFLOP/s that a time implies, of matrix products alone. None where the cell is not known well enough."""
    flops, ms = least_flops(number), number.amount
    return None if flops is None or ms is None or ms <= 0 else flops / ms * 1e-9


def is_time_of_a_phase(number: Number) -> bool:
    """Not of a kernel or of a part of the model, and not a deviation."""
    of_all = "part" not in number.labels and "kernel" not in number.labels
    return (
        number.metric == "duration" and number.phase != "" and number.statistic != "sd" and of_all
    )


def least_flops(number: Number) -> int | None:
    """What the phase that a time is of must compute at least, whichever of the possible cells it is."""
    batch, length = number.one("batch_size"), number.one("context_length")
    if (
        not is_time_of_a_phase(number)
        or number.phase == "optimizer"
        or batch is None
        or length is None
    ):
        return None
    forward = _forward_flops(number, batch, length)
    if forward is None:
        return None
    whole = min(_FORWARDS[name] for name in number.params.get("pass", tuple(_FORWARDS)))
    return forward * {"forward": 1, "backward": 2, "step": whole}[number.phase]


def _forward_flops(number: Number, batch: int, length: int) -> int | None:
    size, width = number.one("size"), number.one("d_head")
    if number.task == "train_step" and size is not None:
        return forward_flops(SIZES[number.year][size], batch, length)
    if number.task == "attention" and width is not None:
        written_out = number.one("attention") == "naive"
        alone = (
            attention_matmul_flops(batch, 1, length, width)
            if written_out
            else attention_flops(batch, length, width, True)
        )
        return alone + (projection_flops(batch, length, width) if number.one("projections") else 0)
    return None


def _faster_than_the_peak(number: Number, _: Around) -> Iterator[str]:
    device, reached = devices()[number.device], implied_tflops(number)
    if reached is None:
        return
    possible = number.params.get("precision", _PRECISIONS)
    peaks = {
        name: peak for name in possible if (peak := peak_tflops(device.limit, name)) is not None
    }
    exceeded = [name for name, peak in peaks.items() if reached > peak]
    if not exceeded:
        for name in (name for name, peak in peaks.items() if reached > NEAR * peak):
            yield f"More than {NEAR:.0%} of the {peaks[name]:g} TFLOP/s that the {device.name} has in {name}: hardly in {name}."
        return
    left = [name for name in possible if name not in exceeded]
    limits = ", ".join(f"{peaks[name]:g} TFLOP/s in {name}" for name in exceeded)
    so = (
        f"it is {' or '.join(left)}, or was not waited for"
        if left
        else "it was not waited for, or is narrower than it says"
    )
    yield f"Faster than the {device.name} can, of which the peak is {limits}: {so}."


def _faster_than_the_memory(number: Number, _: Around) -> Iterator[str]:
    device = devices()[number.device]
    bandwidth, traffic = bandwidth_gb_s(device.limit), _square_traffic(number)
    if bandwidth is None or traffic is None or number.amount is None:
        return
    least_ms = traffic / bandwidth * 1e-6
    needs = f"less than the {device.name} needs to move the scores and weights of attention at {bandwidth:g} GB/s"
    if number.amount < least_ms:
        yield f"The time is {needs}: it was not waited for, or attention is fused."
    instead = number.amount_in(number.or_unit) if number.or_unit else None
    if instead is not None and instead < least_ms:
        yield f"Taken as {number.or_unit}, the time would be {needs}."


def _square_traffic(number: Number) -> int | None:
    batch, length = number.one("batch_size"), number.one("context_length")
    of_attention = number.task == "attention" and number.one("attention") == "naive"
    if not (
        of_attention
        and is_time_of_a_phase(number)
        and number.phase == "forward"
        and batch
        and length
    ):
        return None
    wide = set(number.params.get("precision", _PRECISIONS)) <= {"fp32", "tf32"}
    return square_traffic_bytes(batch, 1, length, _FP32_BYTES if wide else _NARROW_BYTES)


def _no_time(number: Number, _: Around) -> Iterator[str]:
    if is_time_of_a_phase(number) and number.amount is not None and number.amount <= 0:
        yield "A time of less than nothing."


def _scatters(number: Number, around: Around) -> Iterator[str]:
    if number.metric != "duration" or number.statistic != "mean" or number.amount is None:
        return
    sd = around.of_row(number, number.phase, "sd")
    if sd is not None and sd > abs(number.amount):
        yield "Its standard deviation exceeds the mean: the mean says nothing."


def _is_not_its_parts(number: Number, around: Around) -> Iterator[str]:
    """Of a whole step, beside its phases in the same row."""
    if (number.metric, number.phase, number.statistic) != (
        "duration",
        "step",
        "mean",
    ) or number.amount is None:
        return
    forward, backward = (around.of_row(number, phase, "mean") for phase in ("forward", "backward"))
    if (
        forward is not None
        and backward is not None
        and abs(forward + backward - number.amount) > _rounding(number)
    ):
        yield "Forward and backward do not add up to it."
    if forward is not None and number.amount < forward:
        yield "Shorter than its own forward pass."


def _rounding(number: Number) -> float:
    """By how much three numbers of so many digits may miss each other; a thousandth where they are told with many."""
    exponent = number.value.as_tuple().exponent if number.value is not None else 0
    digit = 10.0 ** int(exponent) * (number.amount or 0.0) / float(number.value or 1)
    return max(1.5 * abs(digit), 1e-4 * abs(number.amount or 0.0))


def _too_little_memory(number: Number, _: Around) -> Iterator[str]:
    size = number.one("size")
    if (
        number.task != "train_step"
        or number.metric != "peak"
        or number.amount is None
        or size is None
    ):
        return
    passes = number.params.get("pass", tuple(_COPIES))
    wide = set(number.params.get("precision", _PRECISIONS)) <= {
        "fp32",
        "tf32",
        "bf16",
        "fp16",
    }  # autocast keeps them in fp32
    copies = min(_COPIES[name] for name in passes) * (_FP32_BYTES if wide else _NARROW_BYTES)
    if number.amount < copies * parameter_count(SIZES[number.year][size]):
        yield "Less memory than parameters, gradients and the optimizer's state of this size take."


def _too_much_memory(number: Number, _: Around) -> Iterator[str]:
    device = devices()[number.device]
    most = math.inf if device.memory_gib is None else device.memory_gib * 1024**3
    if number.metric in ("peak", "held") and (number.amount or 0.0) > most:
        yield f"More memory than the {device.name} has."


def _falls_with_length(number: Number, around: Around) -> Iterator[str]:
    length = number.one("context_length")
    if number.metric not in ("peak", "held") or number.amount is None or length is None:
        return
    longer = [
        other
        for other in around.other_lengths(number)
        if (other.one("context_length") or 0) > length
    ]
    if any(other.amount is not None and other.amount < number.amount for other in longer):
        yield "More memory than a longer context takes in the same table: something else is counted in it."


def _told_otherwise(number: Number, around: Around) -> Iterator[str]:
    if (
        number.metric != "duration"
        or number.statistic not in ("mean", "median")
        or not number.amount
        or not _warm(number)
    ):
        return
    for other in around.same_cell(number):
        if (
            other.amount
            and _warm(other)
            and max(number.amount / other.amount, other.amount / number.amount) > APART
        ):
            yield f"`{other.title}` of the same write-up puts the same cell more than {APART:g} times apart."


def _warm(number: Number) -> bool:
    """As far as is said."""
    return all(steps >= WARM for steps in number.params.get("warmup_steps", ()))


def _overlap(number: Number, other: Number, without: Sequence[str]) -> bool:
    """Whether two may be of the same cell, but for some axes."""
    shared = (set(number.params) & set(other.params)) - set(without)
    return all(set(number.params[axis]) & set(other.params[axis]) for axis in shared)


CHECKS: tuple[Callable[[Number, Around], Iterator[str]], ...] = (
    _faster_than_the_peak,
    _faster_than_the_memory,
    _no_time,
    _scatters,
    _is_not_its_parts,
    _too_little_memory,
    _too_much_memory,
    _falls_with_length,
    _told_otherwise,
)
