"""Optimizers by name: the course's AdamW as a plain loop, and torch's optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

LEARNING_RATE = 1e-3
BETAS = (0.9, 0.999)
EPS = 1e-8
WEIGHT_DECAY = 0.01


class CourseAdamW(Optimizer):
    """AdamW as the course writes it: a loop over the parameters, each update out of place.

    It launches about ten small kernels a parameter and holds a handful of temporaries of the
    largest one. Torch's own optimizer does neither, so the two are worth comparing.
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(
            params, {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient, state = parameter.grad, self.state[parameter]
                step = state.get("step", 0) + 1
                first = (
                    beta1 * state.get("first", torch.zeros_like(parameter)) + (1 - beta1) * gradient
                )
                second = (
                    beta2 * state.get("second", torch.zeros_like(parameter))
                    + (1 - beta2) * gradient**2
                )
                rate = group["lr"] * math.sqrt(1 - beta2**step) / (1 - beta1**step)
                parameter -= group["lr"] * group["weight_decay"] * parameter
                parameter -= rate * first / (torch.sqrt(second) + group["eps"])
                state.update(step=step, first=first, second=second)
        return loss


_TORCH_ADAMW: dict[str, Any] = {
    "lr": LEARNING_RATE,
    "betas": BETAS,
    "eps": EPS,
    "weight_decay": WEIGHT_DECAY,
}

# SGD is fused, and Adafactor a loop: each is the form of the least memory.
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "course": CourseAdamW,
    "foreach": partial(AdamW, foreach=True, **_TORCH_ADAMW),
    "fused": partial(AdamW, fused=True, **_TORCH_ADAMW),
    "loop": partial(AdamW, foreach=False, **_TORCH_ADAMW),
    "sgd": partial(SGD, fused=True, lr=LEARNING_RATE),
    "adafactor": partial(Adafactor, foreach=False, lr=LEARNING_RATE),
    "muon": partial(Muon, lr=LEARNING_RATE),
}
