"""Tell errors apart: out of device memory, out of host memory, no thread, no kernel for it."""

from __future__ import annotations

import re

import torch

from tasks.spec.messages import message_of

_UNITS = {"bytes": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
_DEVICE_REFUSED = r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
# Messages of torch's CPU allocator, of C++ and of the kernel.
_HOST_REFUSED = r"can't allocate memory|std::bad_alloc|Cannot allocate memory"
# Messages of the C library and of Python without memory for a stack, or at the limit of threads.
_THREAD_REFUSED = r"Resource temporarily unavailable|can't start new thread"
_BACKEND_REFUSED = (
    r"No available kernel|No viable backend|cuDNN Frontend error|No execution plans|No valid engine"
)


def is_unsupported(error: BaseException) -> bool:
    """Return True if torch or cuDNN has no kernel for this hardware, shape and dtype."""
    return isinstance(error, RuntimeError) and _matches(error, _BACKEND_REFUSED)


def is_device_oom(error: BaseException) -> bool:
    """Return True if torch or a CUDA library ran out of the device's memory."""
    # cuBLAS and cuDNN report it as a plain RuntimeError.
    is_refusal = isinstance(error, RuntimeError) and _matches(error, _DEVICE_REFUSED)
    return is_refusal or isinstance(error, torch.OutOfMemoryError)


def is_host_oom(error: BaseException) -> bool:
    """Return True if Python, torch's CPU allocator or the C++ runtime ran out of host memory."""
    is_refusal = isinstance(error, RuntimeError | OSError) and _matches(error, _HOST_REFUSED)
    return is_refusal or isinstance(error, MemoryError)


def is_thread_limit(error: BaseException) -> bool:
    """Return True if no thread or process could start.

    Under a memory limit its stack did not fit; otherwise the host has other limits.
    """
    return isinstance(error, RuntimeError | OSError) and _matches(error, _THREAD_REFUSED)


def _matches(error: BaseException, pattern: str) -> bool:
    return re.search(pattern, message_of(error)) is not None


def asked_bytes(error: BaseException) -> int | None:
    """Return the size of the failed allocation from its message, or None if it has none."""
    # torch has no other interface to this number.
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", message_of(error))
    return round(float(found[1]) * _UNITS[found[2]]) if found else None
