"""Open the device of a cell, limit its memory, and set precision and seed."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import DefaultDeviceType

from tasks.harness.device import Device, open_device
from tasks.harness.precision import set_precision
from tasks.spec.parameters import Params, TimedParams


def open_capped(params: Params) -> Device:
    """Return the device with the cell's memory limit.

    Raise RuntimeError without such a device, and Skip if its memory is smaller than the limit.
    """
    device = open_device(params.device)
    if params.memory_limit_gib is not None:
        device.limit_memory(params.memory_limit_gib)
    return device


def set_up(params: TimedParams) -> Device:
    """Return the device of a timed task, with limit, precision and seed set.

    Raise Skip if the device does not support the precision.
    """
    set_precision(params)
    device = open_capped(params)
    # Checkpoints preserve the random state of the device that their tensors are on. Of tensors on
    # the CPU they preserve that of a GPU, too, and fail if the first compilation, which asks for
    # its properties, is within a checkpoint.
    DefaultDeviceType.set_device_type(params.device)
    torch.manual_seed(params.seed)
    return device
