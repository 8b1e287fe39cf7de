"""How every task begins."""

from __future__ import annotations

import torch

from tasks.harness.device import Device, open_device
from tasks.harness.precision import set_precision
from tasks.spec.parameters import Params, TimedParams


def open_capped(params: Params) -> Device:
    """The device, its memory limited as the cell says. Raises RuntimeError where there is none, Skip where it has not so much."""
    device = open_device(params.device)
    if params.memory_limit_gib is not None:
        device.limit_memory(params.memory_limit_gib)
    return device


def set_up(params: TimedParams) -> Device:
    """For a task that is timed: the device, capped, with the precision set and the seed planted. Raises Skip where it does not
    have the precision."""
    set_precision(params)
    device = open_capped(params)
    torch.manual_seed(params.seed)
    return device
