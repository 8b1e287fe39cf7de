"""CUDA, CPU and MPS behind one interface: synchronise, read and limit memory, recognise OOM."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch

GIB = 1024**3
# Functions that torch computes with MKL's vector mathematics on the CPU.
VECTOR_MATH = (
    "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1",
    "floor", "log", "log10", "log1p", "log2", "sin", "sinh", "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip
_CLEAR_REFS = Path("/proc/self/clear_refs")


class Skip(Exception):
    """The cell cannot be measured on this hardware; the reason becomes its evidence."""


class Device(Protocol):
    """The device that a cell computes on. Sizes are in bytes, or None if it does not report them.

    missing_peak_reason: why peaks are None; empty if they are not, or if the reason is unknown.
    """

    kind: str
    missing_peak_reason: str

    @property
    def torch_device(self) -> torch.device: ...

    def synchronize(self) -> None: ...

    def limit_memory(self, gib: float) -> None: ...

    def reset_peaks(self) -> None: ...

    def peaks(self) -> Mapping[str, int | None]: ...

    def held(self) -> Mapping[str, int | None]: ...

    def memory_evidence(self) -> Mapping[str, int | None]: ...

    def facts(self) -> Mapping[str, object]: ...


class CudaDevice:
    """An NVIDIA GPU: the one that is the process's current device."""

    kind = "cuda"
    missing_peak_reason = ""

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def limit_memory(self, gib: float) -> None:
        """Limit the memory that the caching allocator reserves."""
        # The CUDA context, 0.5 to 0.6 GiB, is outside of the allocator and comes on top.
        total = torch.cuda.get_device_properties(self.torch_device).total_memory
        if gib * GIB > total:
            raise Skip(f"memory_limit_gib {gib:g} is more than this GPU has: {total / GIB:.1f} GiB")
        torch.cuda.set_per_process_memory_fraction(gib * GIB / total)

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peaks(self) -> Mapping[str, int | None]:
        # Allocated are whole blocks, requested the sizes that torch asked for: up to 2.4 % less.
        # A replayed memory snapshot adds up to the requested peak.
        stats = torch.cuda.memory_stats()
        kinds = ("allocated", "reserved", "requested")
        return {f"peak_{kind}_bytes": stats.get(f"{kind}_bytes.all.peak") for kind in kinds}

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

    def facts(self) -> Mapping[str, object]:
        properties = torch.cuda.get_device_properties(self.torch_device)
        return {
            "gpu": properties.name,
            "gpu_uuid": str(properties.uuid),
            "gpu_memory_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
        }


class CpuDevice:
    """The CPU. Sizes are read from Linux's /proc; without it they are None, and limits are refused.

    Its peaks are those of the process's resident set, because its allocator keeps no statistics.
    """

    kind = "cpu"
    missing_peak_reason = ""
    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        settle_vector_math()

    def synchronize(self) -> None:
        pass

    def limit_memory(self, gib: float) -> None:
        """Limit the process's private writable memory to its present size plus `gib`."""
        held = _status_bytes("VmData")
        if held is None:
            raise RuntimeError("memory_limit_gib on the CPU needs Linux's /proc/self/status")
        limit = held + int(gib * GIB)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    def reset_peaks(self) -> None:
        try:
            _CLEAR_REFS.write_text("5")  # resets VmHWM to the present size, see proc(5)
        except OSError as error:
            # Some containers refuse. The peak would then include everything since the start.
            reason = f"the peak cannot be reset: {_CLEAR_REFS}: {error.strerror}"
            self.missing_peak_reason = reason
        else:
            self.missing_peak_reason = ""

    def peaks(self) -> Mapping[str, int | None]:
        peak = _status_bytes("VmHWM") if not self.missing_peak_reason else None
        return {"peak_rss_bytes": peak}

    def held(self) -> Mapping[str, int | None]:
        return {"held_rss_bytes": _status_bytes("VmRSS")}

    def memory_evidence(self) -> Mapping[str, int | None]:
        return {"allocated_bytes": _status_bytes("VmData"), "rss_bytes": _status_bytes("VmRSS")}

    def facts(self) -> Mapping[str, object]:
        return {"threads": torch.get_num_threads()}


class MpsDevice:
    """Apple's GPU. It records no peaks; `peaks` is the memory in use at the end of a phase."""

    kind = "mps"
    missing_peak_reason = ""
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

    def facts(self) -> Mapping[str, object]:
        return {"gpu": "Apple MPS", "gpu_memory_bytes": torch.mps.recommended_max_memory()}


def open_device(kind: str) -> Device:
    """Return a device. Raise RuntimeError if torch cannot use it."""
    kinds: dict[str, Callable[[], Device]] = {"cuda": CudaDevice, "mps": MpsDevice}
    return kinds.get(kind, CpuDevice)()


def settle_vector_math() -> None:
    """Make MKL choose its kernel of each function now, while a single thread computes."""
    # MKL chooses at the first call. If several threads make that call together, one of them may get
    # a kernel of 14 bits at any requested accuracy: github.com/pytorch/pytorch/issues/188792.
    for dtype in (torch.float32, torch.float64):
        half = torch.full((1,), 0.5, dtype=dtype)
        for name in VECTOR_MATH:
            getattr(torch, name)(half)


def _status_bytes(field: str) -> int | None:
    try:
        status = Path("/proc/self/status").read_text()
    except FileNotFoundError:
        return None
    found = re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else None
