"""Models that data parallelism may stumble over."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tasks.training import losses

ODD = {
    **dict.fromkeys(("d_model", "d_ff", "num_layers", "num_heads")),
    "model": "tests.support.odd_models:Odd",
}


class Odd(nn.Module):
    """A model with a tied weight, a frozen one, one of a single element and sizes that are odd.

    wide: also a weight in fp64. unused: also one that no output depends on.
    """

    def __init__(self, wide: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 7)
        self.layers = nn.ModuleList(_Residual() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)
        self.wide = nn.Parameter(torch.ones(7, dtype=torch.float64 if wide else torch.float32))
        self.unused = nn.Parameter(torch.ones(3, 3)) if unused else None
        self.head = nn.Linear(7, 50)
        self.other_head = nn.Linear(7, 50)
        self.other_head.weight = self.head.weight
        self.lm_head = self.head

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x) * self.scale * self.frozen
        x = (x * self.wide).float()
        logits = self.head(x) + self.other_head(x)
        return logits if labels is None else losses.mean_loss(logits, labels)


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(7, 5), nn.GELU(), nn.Linear(5, 7))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)  # type: ignore[no-any-return]


def loss_with_an_attribute(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return a loss that reads the model's attributes, too, as a regulariser does."""
    loss = losses.mean_loss(model(tokens), targets)
    scale: Tensor = model.scale  # type: ignore[assignment]
    return loss + 0.01 * scale.square().sum()
