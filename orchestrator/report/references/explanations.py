"""What of a published table differs from a cell of ours in ways that matter, in one line a table, from what is transcribed of it:
GPU, precision, whether forward keeps a graph, optimizer, batch size, warm-up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

from orchestrator.hardware.gpu_catalog import bandwidth_gb_s, peak_tflops
from orchestrator.report.references.devices import devices
from orchestrator.report.references.records import Number, published

_PEAKS = ("fp32", "tf32", "bf16")
_WITHOUT_GRAPH, _WITH_GRAPH = "forward", "forward_grad"


@cache
def explanations() -> dict[tuple[str, str], str]:
    """By write-up and table."""
    found: dict[tuple[str, str], list[Number]] = {}
    for number in published():
        found.setdefault((number.writeup, number.table), []).append(number)
    return {key: _explain(numbers) for key, numbers in found.items()}


def _explain(numbers: list[Number]) -> str:
    first = numbers[0]
    points = [_gpu(first.device), *_precision(numbers)]
    if first.task == "train_step":
        points += [*_graph(numbers), *_optimizer(numbers)]
    if first.task != "accumulation":
        points += [*_batch(numbers), _warm_up(numbers)]
    return f"What differs in `{first.title}`: {'; '.join(points)}."


def _gpu(word: str) -> str:
    device = devices()[word]
    peaks = {name: peak_tflops(device.limit, name) for name in _PEAKS}
    known = [f"{peak:g} in {name}" for name, peak in peaks.items() if peak is not None]
    bandwidth = bandwidth_gb_s(device.limit)
    moved = f", {bandwidth:g} GB/s" if bandwidth else ""
    return f"{device.name} (peak TFLOP/s {', '.join(known)}{moved})" if known else device.name


def _precision(numbers: list[Number]) -> Iterator[str]:
    told = dict.fromkeys(number.params.get("precision", ()) for number in numbers)
    words = [
        " or ".join(values) + " (which is not said)" * (len(values) > 1)
        for values in told
        if values
    ]
    yield f"in {' and in '.join(words)}" if words else "precision not said"


def _graph(numbers: list[Number]) -> Iterator[str]:
    passes = [set(number.params.get("pass", ())) for number in numbers]
    if any({_WITHOUT_GRAPH, _WITH_GRAPH} <= one for one in passes):
        yield "whether forward keeps a graph for a backward pass is not said"
    elif any(one == {_WITHOUT_GRAPH} for one in passes):
        yield "forward without a graph"
    elif any(one == {_WITH_GRAPH} for one in passes):
        yield "forward with a graph for a backward pass"
    elif not any(passes):
        yield "the pass is not said"


def _optimizer(numbers: list[Number]) -> Iterator[str]:
    passes = [set(number.params.get("pass", ())) for number in numbers]
    if any({"forward_backward", "train_step"} <= one for one in passes):
        yield "whether a step includes an optimizer is not said"
    elif any("train_step" in one for one in passes):
        said = dict(numbers[0].said).get("optimizer")
        yield (
            f"a step with an optimizer ({said})"
            if said
            else "a step with an optimizer, which is not named"
        )
    elif any(passes):
        yield "no optimizer"


def _batch(numbers: list[Number]) -> Iterator[str]:
    sizes = _values(numbers, "batch_size")
    yield f"batch {' and '.join(sizes)}" if sizes else "batch size not said"


def _warm_up(numbers: list[Number]) -> str:
    steps = _values(numbers, "warmup_steps")
    if steps:
        return f"{', '.join(steps)} steps of warm-up"
    said = dict(numbers[0].said).get("steps")
    return f"warm-up: {said}" if said else "warm-up not said"


def _values(numbers: Iterable[Number], axis: str) -> list[str]:
    return list(
        dict.fromkeys(str(value) for number in numbers for value in number.params.get(axis, ()))
    )
