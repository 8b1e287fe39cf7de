"""A device of which every allocation is on record, on the CPU: what torch's allocator of CUDA writes down, in its format."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tasks.harness.device import CpuDevice


class RecordedDevice(CpuDevice):
    """The host passing for a GPU: it is asked for what only an allocator knows."""

    kind = "cuda"

    def __init__(self, allocator: RecordedAllocator) -> None:
        self._allocator = allocator

    def reset_peaks(self) -> None:
        self._allocator.peak_bytes = self._allocator.live_bytes

    def peaks(self) -> Mapping[str, int | None]:
        peak = self._allocator.peak_bytes
        return {
            "peak_allocated_bytes": peak,
            "peak_requested_bytes": peak,
            "peak_reserved_bytes": peak,
        }


class _Storage(weakref.ref[Any]):
    __slots__ = ("address", "nbytes")
    address: int
    nbytes: int


class RecordedAllocator(TorchDispatchMode):
    """While it is entered, it sees every new storage, and hears when one goes. most_events: of its ring buffer."""

    def __init__(self, most_events: int = 10**9) -> None:
        super().__init__()
        self.memory = SimpleNamespace(
            _record_memory_history=self._record,
            _snapshot=self.snapshot,
            _set_memory_metadata=self._name,
        )
        self.live_bytes = self.peak_bytes = 0
        self._most_events = most_events
        self._part = ""
        self._recording = False
        self._clock = 0
        self._events: list[dict[str, Any]] = []
        self._annotations: list[dict[str, Any]] = []
        self._live: dict[int, _Storage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else [result]:
            if isinstance(made, Tensor):
                self.see(made)
        return result

    def see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if not address or address in self._live:
            return
        reference = _Storage(storage, self._freed)
        reference.address, reference.nbytes = address, storage.nbytes()
        self._live[address] = reference
        self._event("alloc", reference)
        self.live_bytes += reference.nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def snapshot(self) -> dict[str, Any]:
        blocks = [
            {
                "address": s.address,
                "size": s.nbytes,
                "requested_size": s.nbytes,
                "state": "active_allocated",
                "frames": [],
            }
            for s in self._live.values()
        ]
        segments = [{"device": 0, "address": 0, "blocks": blocks}]
        trace = list(self._events[-self._most_events :])
        return {
            "segments": segments,
            "device_traces": [trace],
            "external_annotations": list(self._annotations),
        }

    def phase_range(self, name: str) -> Any:
        """In place of torch's `record_function`."""
        return SimpleNamespace(
            __enter__=lambda: self._annotate(name, "START"),
            __exit__=lambda *error: self._annotate(name, "END"),
        )

    def _freed(self, reference: Any) -> None:
        del self._live[reference.address]
        self.live_bytes -= reference.nbytes
        for action in ("free_requested", "free_completed"):
            self._event(action, reference)

    def _event(self, action: str, storage: _Storage) -> None:
        self._clock += 1
        if self._recording:
            self._events.append(
                {
                    "action": action,
                    "addr": storage.address,
                    "size": storage.nbytes,
                    "stream": 0,
                    "time_us": self._clock,
                    "user_metadata": self._part,
                    "frames": [],
                }
            )

    def _annotate(self, name: str, stage: str) -> None:
        self._annotations.append(
            {"name": name, "stage": stage, "device": 0, "time_us": self._clock}
        )
        self._clock += 1

    def _record(self, enabled: str | None = "all", clear_history: bool = False, **_: Any) -> None:
        self._recording = enabled is not None
        if clear_history:
            self._events, self._annotations = [], []

    def _name(self, part: str) -> None:
        self._part = part


def see_all(allocator: RecordedAllocator, tensors: Iterable[Any]) -> None:
    """What was there before it was entered."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            allocator.see(tensor)
