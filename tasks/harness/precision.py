"""Set the precision of a cell, and read it back from torch. TF32 is off unless requested."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, TypeVar

import torch

from tasks.harness.device import Skip
from tasks.spec.parameters import Params, TimedParams

# Read by NVIDIA's libraries; it takes precedence over torch's flags.
_OVERRIDE = "NVIDIA_TF32_OVERRIDE"
_OVERRULES = {"fp32": "1", "tf32": "0"}
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
# The dtypes of a task's axis that names one.
DTYPES = {**_AUTOCAST, "fp32": torch.float32, "fp64": torch.float64}

Setting = TypeVar("Setting")


class _Flags(NamedTuple):
    """Settings of torch, by the names of the facts that they are read back as."""

    float32_matmul_precision: str
    cudnn_allow_tf32: bool


def set_precision(params: TimedParams) -> None:
    """Set torch's flags for the cell.

    Raise Skip if the device does not support the precision, and RuntimeError if an environment
    variable overrules it.
    """
    precision, on_cuda = params.precision, params.device == "cuda"
    override = os.environ.get(_OVERRIDE)
    if on_cuda and override is not None and override == _OVERRULES.get(precision):
        overruled = f"{_OVERRIDE}={override} overrules {precision} in every matrix product"
        raise RuntimeError(f"{overruled}: unset it")
    if precision == "tf32" and not on_cuda:
        raise Skip(f"tf32 exists on CUDA only, not on {params.device}")
    if precision == "tf32" and torch.cuda.get_device_capability() < (8, 0):
        raise Skip(f"tf32 needs an Ampere GPU or newer, not {torch.cuda.get_device_name()}")
    # False: emulated bf16 does not count as supported; its times would say nothing about bf16.
    if "bf16" in precision and on_cuda and not torch.cuda.is_bf16_supported(False):
        raise Skip(f"bf16 is not supported by {torch.cuda.get_device_name()}")
    flags = _flags(params)
    torch.set_float32_matmul_precision(flags.float32_matmul_precision)
    torch.backends.cudnn.allow_tf32 = flags.cudnn_allow_tf32


def require_precision(params: Params) -> None:
    """Raise RuntimeError if a flag was changed since, as many training scripts do on import."""
    if not isinstance(params, TimedParams):
        return
    require_default_dtype(torch.float32, params)
    set_now = precision_facts(params)
    for name, value in _flags(params)._asdict().items():
        if set_now[name] != value:
            changed = "something else" if set_now[name] is None else set_now[name]
            raise RuntimeError(
                f"precision {params.precision} needs {name} {value}, but it was set to {changed} "
                f"while the cell ran: remove that from {_source(params)}"
            )


def require_default_dtype(expected: torch.dtype, params: Params) -> None:
    """Raise RuntimeError if the model or an import changed the dtype of new tensors."""
    if torch.get_default_dtype() != expected:
        found = dtype_name(torch.get_default_dtype())
        raise RuntimeError(
            f"the cell needs the default dtype {dtype_name(expected)}, but it was set to {found}: "
            f"remove torch.set_default_dtype from {_source(params)}"
        )


def require_threads(expected: int, params: Params) -> None:
    """Raise RuntimeError if torch computes with another number of threads than at the start."""
    found = torch.get_num_threads()
    if found != expected:
        raise RuntimeError(
            f"torch had {expected} threads at the start of the cell and has {found} now: remove "
            f"torch.set_num_threads from {_source(params)}, or set OMP_NUM_THREADS under env in the "
            "config"
        )


def _source(params: Params) -> str:
    return getattr(params, "model", None) or "the imported modules"


def _flags(params: TimedParams) -> _Flags:
    if params.precision == "tf32":
        return _Flags("high", True)
    return _Flags("highest", False)


def autocast(params: TimedParams) -> Callable[[], AbstractContextManager[object]]:
    """Return a function that makes the context of the forward pass."""
    low = _AUTOCAST.get(params.precision)
    if low is None or not params.autocasts:
        return nullcontext
    return lambda: torch.autocast(params.device, dtype=low)


def stored_dtype(params: TimedParams) -> torch.dtype:
    """Return the dtype of parameters and inputs."""
    if params.precision == "bf16_pure":
        return torch.bfloat16
    return torch.float32


def matmul_dtype(params: TimedParams) -> torch.dtype:
    """Return the dtype of the inputs of matrix products."""
    return _AUTOCAST.get(params.precision, stored_dtype(params))


def precision_facts(params: TimedParams) -> dict[str, object]:
    """Return the settings as torch reports them."""
    # Outside of its context, autocast always reports that it is off.
    with autocast(params)():
        enabled = torch.is_autocast_enabled(params.device)
        autocast_dtype = dtype_name(torch.get_autocast_dtype(params.device)) if enabled else None
    return {
        "float32_matmul_precision": _read_or_none(torch.get_float32_matmul_precision),
        "matmul_allow_tf32": _read_or_none(lambda: torch.backends.cuda.matmul.allow_tf32),
        "cudnn_allow_tf32": _read_or_none(lambda: torch.backends.cudnn.allow_tf32),
        "autocast_dtype": autocast_dtype,
        "nvidia_tf32_override": os.environ.get(_OVERRIDE),
    }


def _read_or_none(read: Callable[[], Setting]) -> Setting | None:
    try:
        return read()
    except RuntimeError:  # after a model used torch's newer interface, `fp32_precision`
        return None


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, `bfloat16` for example."""
    return str(dtype).removeprefix("torch.")
