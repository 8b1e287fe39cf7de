from __future__ import annotations

import pytest
import torch
from torch import nn

from model.optimizer import OPTIMIZERS


@pytest.mark.parametrize("name", ["course", "foreach", "fused"])
def test_all_optimizers_take_the_same_steps(name: str) -> None:
    def train(which: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        optimizer = OPTIMIZERS[which](model.parameters())
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.ones(3, 4, dtype=torch.float64)).pow(2).sum().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    for ours, theirs in zip(train(name), train("foreach"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


def test_the_course_loop_leaves_parameters_without_gradient_alone() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = OPTIMIZERS["course"]([used, unused])
    used.sum().backward()
    optimizer.step()
    assert torch.equal(unused, torch.ones(2))
    assert not torch.equal(used, torch.ones(2))
