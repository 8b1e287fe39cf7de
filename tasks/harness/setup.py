"""How every task that is timed begins."""

from __future__ import annotations

import torch

from tasks.harness.device import Device, open_device
from tasks.harness.params import TimedParams
from tasks.harness.precision import set_precision


def set_up(params: TimedParams) -> Device:
    """The device, capped, with the precision set and the seed planted. Raises Skip where it does not have the precision."""
    set_precision(params)
    device = open_device(params.device)
    if params.memory_limit_gib is not None:
        device.limit_memory(params.memory_limit_gib)
    torch.manual_seed(params.seed)
    return device
