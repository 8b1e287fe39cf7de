"""Gradients and updates of our own strategies, on models that they may stumble over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from model.parallel.collectives import Collectives
from model.parallel.data_parallel import Bucketed, Flat, Naive, Overlap, broadcast_model
from model.parallel.zero1 import Zero1
from tests.support.odd_models import Odd
from tests.support.ranks import RankError, Ranks, often

# One worker starts the server that ranks are forked from, which imports torch.
pytestmark = pytest.mark.xdist_group("ranks")

ROWS, STEPS = 4, 3
WAYS: dict[str, Callable[..., Any]] = {
    "naive": Naive,
    "flat": Flat,
    "overlap": Overlap,
    "bucketed": Bucketed,
    "buckets of one byte": partial(Bucketed, bucket_bytes=1),
    "buckets of 300 bytes": partial(Bucketed, bucket_bytes=300),
}
# Elements of Odd: embedding, three blocks, scale, tied weight and the biases of both heads.
TRAINED = 50 * 7 + 3 * (7 * 5 + 5 + 5 * 7 + 7) + 1 + 50 * 7 + 2 * 50
WIDE, UNUSED = 7, 9


def make_model(seed: int = 0) -> Odd:
    torch.manual_seed(seed)
    return Odd(wide=True, unused=True)


def sgd(parameters: list[nn.Parameter]) -> SGD:
    return SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    loss: Tensor = model(rows[:, :-1], rows[:, 1:])
    return loss


def draw_rows() -> Tensor:
    return torch.randint(50, (ROWS, 9), generator=torch.Generator().manual_seed(1))


def values_of(model: nn.Module) -> dict[str, list[float]]:
    return {name: one.detach().flatten().tolist() for name, one in model.named_parameters()}


def train_alone() -> dict[str, list[float]]:
    model, rows = make_model(), draw_rows()
    optimizer = sgd([one for one in model.parameters() if one.requires_grad])
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        optimizer.step()
    return values_of(model)


def train_on_a_rank(way: str) -> tuple[dict[str, list[float]], Counter[str], Counter[str]]:
    """Return the parameters of a rank, and calls and payload of its last step."""
    collectives = Collectives()
    model = make_model(seed=collectives.rank)  # another model on each rank
    broadcast_model(model)
    rows = draw_rows().chunk(collectives.ranks)[collectives.rank]
    if way == "zero1":
        zero = Zero1(model, collectives, sgd)
        optimizer, communicate, gather = zero.optimizer, zero.communicate, zero.gather
        forget = zero.zero_grad
    else:
        optimizer = sgd([one for one in model.parameters() if one.requires_grad])
        communicate, gather = WAYS[way](model, collectives).communicate, lambda: None
        forget = optimizer.zero_grad
    for _ in range(STEPS):
        collectives.calls.clear()
        collectives.payload_bytes.clear()
        forget()
        loss_of(model, rows).backward()
        communicate()
        optimizer.step()
        gather()
    return values_of(model), collectives.calls, collectives.payload_bytes


def require_close(one: dict[str, list[float]], other: dict[str, list[float]]) -> None:
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert values == pytest.approx(other[name], abs=1e-5), name


@pytest.mark.parametrize(
    "way", often([*WAYS, "zero1"], "flat", "overlap", "buckets of 300 bytes", "zero1")
)
def test_unequal_tied_frozen_and_unused_parameters_are_trained(way: str, two: Ranks) -> None:
    """With a parameter of one element, fewer than ranks, and one of another dtype."""
    expected = two(train_alone)[0]
    assert expected["unused"] == [1.0] * UNUSED  # not even weight decay changes it
    for values, _, _ in two(train_on_a_rank, way):
        require_close(expected, values)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["bucketed", "buckets of 300 bytes", "zero1"])
def test_four_ranks_train_the_same(way: str, four: Ranks) -> None:
    expected = four(train_alone)[0]
    for values, _, _ in four(train_on_a_rank, way):
        require_close(expected, values)


CALLS = {"naive": 18, "flat": 2, "overlap": 18, "bucketed": 2, "buckets of one byte": 18}


@pytest.mark.parametrize("way", often(CALLS, "naive", "bucketed"))
def test_each_trained_parameter_is_sent_once(way: str, two: Ranks) -> None:
    """The tied weight counts once; frozen and unused ones do not."""
    _, calls, payload = two(train_on_a_rank, way)[0]
    assert calls == {"all_reduce": CALLS[way]}
    assert payload == {"all_reduce": 4 * TRAINED + 8 * WIDE}


def bucket_sizes(bucket_bytes: float) -> tuple[tuple[int, ...], list[int]]:
    model = make_model()
    sizes = [one.nbytes for one in model.parameters() if one.requires_grad]
    return Bucketed(model, Collectives(), bucket_bytes).bucket_bytes, sizes


def test_buckets_are_filled_from_the_last_parameter_on(two: Ranks) -> None:
    one_each, sizes = two(bucket_sizes, 1)[0]
    assert list(one_each) == sizes[::-1]
    all_but_wide, _ = two(bucket_sizes, 1e9)[0]
    assert sorted(all_but_wide) == [8 * WIDE, 4 * (TRAINED + UNUSED)]
    some, _ = two(bucket_sizes, 300)[0]
    assert all(size >= 300 for size in some[:-2])
    assert sum(some) == sum(sizes)


def gradients_of_micro_batches(way: str) -> list[float]:
    """Return the gradient of a parameter that only the first of two micro-batches has used."""
    collectives = Collectives()
    used, others = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
    nn.init.ones_(used.weight)
    strategy = WAYS[way](nn.ModuleList([used, others]), collectives)
    x = torch.full((3,), float(collectives.rank))
    with collectives.switched_off():
        used(x).sum().backward()
    others(x).sum().backward()
    strategy.communicate()
    assert used.weight.grad is not None
    return used.weight.grad.flatten().tolist()


@pytest.mark.parametrize("way", often(WAYS, "overlap", "bucketed"))
def test_a_gradient_of_an_earlier_micro_batch_is_averaged(way: str, two: Ranks) -> None:
    assert two(gradients_of_micro_batches, way) == [[0.5] * 6] * 2


def share_of_a_mean(way: str) -> list[float]:
    """Return the gradient of a step that does all that its average needs, but sends nothing."""
    collectives, layer = Collectives(), nn.Linear(3, 2, bias=False)
    strategy = WAYS[way](layer, collectives)
    with collectives.without_transfers():
        layer(torch.full((3,), 1.0 + collectives.rank)).sum().backward()
        strategy.communicate()
    assert not collectives.calls
    assert layer.weight.grad is not None
    return layer.weight.grad.flatten().tolist()


@pytest.mark.parametrize("way", WAYS)
def test_without_transfers_a_rank_keeps_its_share_of_the_mean(way: str, two: Ranks) -> None:
    assert two(share_of_a_mean, way) == [[0.5] * 6, [1.0] * 6]


def step_with_reentrant_checkpoints(way: str) -> None:
    model = nn.Linear(3, 3)
    strategy = WAYS[way](model, Collectives())
    x = torch.ones(3, requires_grad=True)
    hidden = checkpoint(model, x, use_reentrant=True)
    checkpoint(model, hidden, use_reentrant=True).sum().backward()
    strategy.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["overlap", "bucketed"])
def test_a_second_gradient_in_one_backward_pass_is_refused(way: str, two: Ranks) -> None:
    with pytest.raises(RankError, match="two gradients in one backward pass"):
        two(step_with_reentrant_checkpoints, way)
    two(step_with_reentrant_checkpoints, "flat")


def average(dtype: torch.dtype, wire: torch.dtype | None) -> tuple[list[float], int]:
    collectives = Collectives(wire)
    gradient = torch.tensor([1.0, 1 + 2**-10], dtype=dtype) * (1 + 2 * dist.get_rank())
    collectives.average(gradient)
    return gradient.tolist(), collectives.payload_bytes["all_reduce"]


def test_only_wider_gradients_are_rounded_for_the_wire(two: Ranks) -> None:
    exact, rounded = [2.0, 2 + 2**-9], [2.0, 2.0]
    assert two(average, torch.float32, None)[0] == (exact, 8)
    assert two(average, torch.float32, torch.bfloat16)[0] == (rounded, 4)
    assert two(average, torch.float64, torch.bfloat16)[0] == (rounded, 4)
    assert two(average, torch.bfloat16, torch.bfloat16)[0] == (rounded, 4)
    assert two(average, torch.bfloat16, None)[0] == (rounded, 4)
