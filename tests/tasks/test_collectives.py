"""Each collective has the right result on groups of 2, 4 and 8 ranks, and a wrong one is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from typing import Any, get_args

import numpy as np
import pytest

from tasks.collectives import Collective, CollectivesParams, build, make_buffers
from tests.support.ranks import RankError, Ranks

# One worker starts the server that ranks are forked from, which imports torch.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]

COLLECTIVES = get_args(Collective)
Arrays = Sequence[Any]  # of each rank

# The result of each rank from the inputs of all, by numpy.
EXPECTED: dict[str, Callable[[Arrays], list[Any]]] = {
    "all_reduce": lambda inputs: [np.sum(inputs, axis=0)] * len(inputs),
    "all_gather": lambda inputs: [np.concatenate(inputs)] * len(inputs),
    "reduce_scatter": lambda inputs: np.split(np.sum(inputs, axis=0), len(inputs)),
    "broadcast": lambda inputs: [inputs[0]] * len(inputs),
    "all_to_all": lambda inputs: [
        np.concatenate([np.split(one, len(inputs))[rank] for one in inputs])
        for rank in range(len(inputs))
    ],
    "send_recv": lambda inputs: [inputs[rank ^ 1] for rank in range(len(inputs))],
}


def params_of(ranks: int, **values: Any) -> CollectivesParams:
    """Return a collective of a number of elements that is no power of two."""
    fields = {"device": "cpu", "processes": ranks, "size_mb": 0.0123, **values}
    return CollectivesParams.model_validate(fields)


def exchange(ranks: int, values: dict[str, Any]) -> tuple[Any, Any]:
    """Return what this rank had and what a call of the collective left it."""
    buffers = make_buffers(params_of(ranks, **values))
    inputs = buffers.source.clone()
    is_async = values.get("call") == "async"
    work = buffers.call(async_op=is_async)
    if is_async:
        work.wait()
    return inputs.double().numpy(), buffers.result.double().numpy()


def measure_steps(ranks: int, values: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a cell after some steps, whose result its own check has compared."""
    workload = build(params_of(ranks, **values))
    for _ in range(3):
        workload.step(lambda name: nullcontext())
    assert workload.verify is not None
    workload.verify()
    return dict(workload.facts)


def expect_another_element(ranks: int, values: dict[str, Any]) -> None:
    buffers = make_buffers(params_of(ranks, **values))
    buffers.wanted[3] += 1
    buffers.check()


@pytest.fixture(scope="module", params=[2, 4, 8])
def group(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with closing(Ranks(request.param)) as ranks:
        yield ranks


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("call", ["sync", "async"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_collective_leaves_each_rank_what_numpy_computes(
    collective: str, call: str, dtype: str, group: Ranks
) -> None:
    values = {"collective": collective, "call": call, "dtype": dtype}
    inputs, results = zip(*group(exchange, group.count, values), strict=True)
    assert len({array.tobytes() for array in inputs}) == group.count  # no two ranks send the same
    expected = EXPECTED[collective](inputs)
    for rank, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        assert np.array_equal(result, wanted), rank


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_steps_of_a_cell_have_right_results_and_the_size_that_is_reported(
    collective: str, group: Ranks
) -> None:
    facts = group(measure_steps, group.count, {"collective": collective})
    factors = {"all_reduce": 2 * (group.count - 1) / group.count, "broadcast": 1, "send_recv": 1}
    size = 4 * (12300 // 4 // group.count) * group.count
    factor = factors.get(collective, (group.count - 1) / group.count)
    wanted = {"collective_calls": 1, "collective_bytes": size, "bus_bytes": round(size * factor)}
    assert facts == [wanted] * group.count


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_wrong_element_is_named(collective: str, group: Ranks) -> None:
    with pytest.raises(RankError, match=r"1 of \d+ elements are wrong, the first one is number 3"):
        group(expect_another_element, group.count, {"collective": collective})
