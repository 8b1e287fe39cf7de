"""The three kinds of device behind one face: synchronise, watch memory, cap it, tell an out-of-memory from a bug."""

from __future__ import annotations

import re
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

GIB = 1024**3
# Those that torch hands to MKL's vector mathematics on the CPU.
VECTOR_MATH = (
    "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1", "floor", "log", "log10", "log1p",
    "log2", "sin", "sinh", "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip
_CLEAR_REFS = Path("/proc/self/clear_refs")
_UNITS = {"bytes": 1, "KiB": 1024, "MiB": 1024**2, "GiB": GIB}


class Skip(Exception):
    """This cell cannot be measured here, and that is no fault: the reason becomes its evidence."""


class Device(Protocol):
    """What a cell computes on. Sizes are in bytes, null where the device does not tell them.

    untold: why peaks are null, where something can be said of it.
    """

    kind: str
    untold: str

    @property
    def torch_device(self) -> torch.device: ...

    def synchronize(self) -> None: ...

    def limit_memory(self, gib: float) -> None: ...

    def reset_peaks(self) -> None: ...

    def peaks(self) -> Mapping[str, int | None]: ...

    def held(self) -> Mapping[str, int | None]: ...

    def memory_evidence(self) -> Mapping[str, int | None]: ...

    def facts(self) -> Mapping[str, Any]: ...


class CudaDevice:
    kind = "cuda"
    untold = ""

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def limit_memory(self, gib: float) -> None:
        """Caps what the caching allocator may reserve. The CUDA context, some 0.5 GiB, comes on top."""
        total = torch.cuda.get_device_properties(self.torch_device).total_memory
        if gib * GIB > total:
            raise Skip(f"memory_limit_gib {gib:g} is more than this GPU has: {total / GIB:.1f} GiB")
        torch.cuda.set_per_process_memory_fraction(gib * GIB / total)

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peaks(self) -> Mapping[str, int | None]:
        stats = torch.cuda.memory_stats()
        return {
            f"peak_{kind}_bytes": stats.get(f"{kind}_bytes.all.peak")
            for kind in ("allocated", "reserved", "requested")
        }

    def held(self) -> Mapping[str, int | None]:
        return {"held_allocated_bytes": torch.cuda.memory_allocated()}

    def memory_evidence(self) -> Mapping[str, int | None]:
        free, total = torch.cuda.mem_get_info()
        stats = torch.cuda.memory_stats()
        return {
            "allocated_bytes": stats.get("allocated_bytes.all.current", 0),
            "reserved_bytes": stats.get("reserved_bytes.all.current", 0),
            "free_bytes": free,
            "total_bytes": total,
        }

    def facts(self) -> Mapping[str, Any]:
        properties = torch.cuda.get_device_properties(self.torch_device)
        return {
            "gpu": properties.name,
            "gpu_uuid": str(properties.uuid),
            "gpu_memory_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
        }


class CpuDevice:
    """Peaks are of the whole process's resident set: what the CPU has in place of an allocator's statistics.

    Read from Linux's /proc; elsewhere the sizes are null and a cap is refused.
    """

    kind = "cpu"
    untold = ""
    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        settle_vector_math()

    def synchronize(self) -> None:
        pass

    def limit_memory(self, gib: float) -> None:
        """Caps the process's private writable memory at what it holds now plus `gib`."""
        held = _status_bytes("VmData")
        if held is None:
            raise RuntimeError("memory_limit_gib on the CPU needs Linux's /proc/self/status")
        limit = held + int(gib * GIB)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    def reset_peaks(self) -> None:
        try:
            _CLEAR_REFS.write_text("5")  # the documented way to restart VmHWM at the present size
        except (
            OSError
        ) as error:  # refused in some containers: the peak is then that of the whole process so far
            self.untold = f"the peak cannot be restarted: {_CLEAR_REFS}: {error.strerror}"
        else:
            self.untold = ""

    def peaks(self) -> Mapping[str, int | None]:
        return {"peak_rss_bytes": None if self.untold else _status_bytes("VmHWM")}

    def held(self) -> Mapping[str, int | None]:
        return {"held_rss_bytes": _status_bytes("VmRSS")}

    def memory_evidence(self) -> Mapping[str, int | None]:
        return {"allocated_bytes": _status_bytes("VmData"), "rss_bytes": _status_bytes("VmRSS")}

    def facts(self) -> Mapping[str, Any]:
        return {"threads": torch.get_num_threads()}


class MpsDevice:
    """Apple's GPU. It keeps no peak: what is in use at the end of a phase stands in for one."""

    kind = "mps"
    untold = ""
    torch_device = torch.device("mps")

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def limit_memory(self, gib: float) -> None:
        torch.mps.set_per_process_memory_fraction(gib * GIB / torch.mps.recommended_max_memory())

    def reset_peaks(self) -> None:
        pass

    def peaks(self) -> Mapping[str, int | None]:
        return {
            "allocated_after_bytes": torch.mps.current_allocated_memory(),
            "reserved_after_bytes": torch.mps.driver_allocated_memory(),
        }

    def held(self) -> Mapping[str, int | None]:
        return {"held_allocated_bytes": torch.mps.current_allocated_memory()}

    def memory_evidence(self) -> Mapping[str, int | None]:
        return {"allocated_bytes": torch.mps.current_allocated_memory()}

    def facts(self) -> Mapping[str, Any]:
        return {"gpu": "Apple MPS", "gpu_memory_bytes": torch.mps.recommended_max_memory()}


def open_device(kind: str) -> Device:
    """Raises RuntimeError where torch cannot reach such a device."""
    match kind:
        case "cuda":
            return CudaDevice()
        case "mps":
            return MpsDevice()
        case _:
            return CpuDevice()


def settle_vector_math() -> None:
    """Has MKL choose its kernels of each function while one thread computes.

    It does so at the first call; where several threads make that at once, one of them may be given a kernel of 14 bits, for
    that call alone, whatever the accuracy asked for (https://github.com/pytorch/pytorch/issues/188792).
    """
    for dtype in (torch.float32, torch.float64):
        half = torch.full((1,), 0.5, dtype=dtype)
        for name in VECTOR_MATH:
            getattr(torch, name)(half)


_DEVICE_REFUSED = r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
_HOST_REFUSED = r"can't allocate memory|std::bad_alloc|Cannot allocate memory"  # torch's CPU allocator, C++, the kernel
# The C library and Python, where no stack could be had, or no more threads or processes.
_THREAD_REFUSED = r"Resource temporarily unavailable|can't start new thread"
_BACKEND_REFUSED = (
    r"No available kernel|No viable backend|cuDNN Frontend error|No execution plans|No valid engine"
)


def message_of(error: BaseException) -> str:
    """What it says, whatever its own way of saying that does."""
    try:
        return str(error)
    except BaseException as broken:
        return f"its message cannot be read: {type(broken).__name__}"


def backend_refused(error: BaseException) -> bool:
    """Whether torch or cuDNN has no kernel for what was asked, on this hardware, in this shape and dtype."""
    return (
        isinstance(error, RuntimeError)
        and re.search(_BACKEND_REFUSED, message_of(error)) is not None
    )


def device_refused(error: BaseException) -> bool:
    """Whether torch or a CUDA library was refused memory of the device."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return (
        isinstance(error, RuntimeError)
        and re.search(_DEVICE_REFUSED, message_of(error)) is not None
    )


def host_refused(error: BaseException) -> bool:
    """Whether Python, torch's CPU allocator or the C++ runtime was refused memory of the host."""
    if isinstance(error, MemoryError):
        return True
    return (
        isinstance(error, RuntimeError | OSError)
        and re.search(_HOST_REFUSED, message_of(error)) is not None
    )


def thread_refused(error: BaseException) -> bool:
    """Whether no thread or process could be begun. Under a cap on memory that is its stack; else the host has other limits."""
    return (
        isinstance(error, RuntimeError | OSError)
        and re.search(_THREAD_REFUSED, message_of(error)) is not None
    )


def asked_bytes(error: BaseException) -> int | None:
    """The size of the allocation that was refused, read from the message: torch offers it nowhere else."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", message_of(error))
    return round(float(found[1]) * _UNITS[found[2]]) if found else None


def _status_bytes(field: str) -> int | None:
    status = Path("/proc/self/status")
    found = (
        re.search(rf"^{field}:\s+(\d+) kB", status.read_text(), re.MULTILINE)
        if status.exists()
        else None
    )
    return int(found[1]) * 1024 if found else None
