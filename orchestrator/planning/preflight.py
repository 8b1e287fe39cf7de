"""Checks of the hosts before the first cell is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from orchestrator.common.errors import PlatformError
from orchestrator.hardware.gpu_catalog import GpuModel, gpu_from_driver, matches_kind
from orchestrator.hardware.host import HostInfo
from orchestrator.planning.attempt_queue import AttemptQueue
from orchestrator.planning.request import SweepRequest


def exclude_wider_cells(
    queue: AttemptQueue, hosts: Sequence[HostInfo], say: Callable[[str], None]
) -> None:
    """Leaves the cells for another run that ask for more GPUs together than any host here has of their kind.

    Raises PlatformError where that is all of them.
    """

    def most(kind: str | None) -> int:
        matching = (
            [gpu for gpu in host.gpus if kind is None or matches_kind(gpu.name, kind)]
            for host in hosts
        )
        return max(map(len, matching), default=0)

    wider = [
        cell for cell in queue.cells if cell.params.gpu_count > max(1, most(cell.params.gpu_kind))
    ]
    if not wider:
        return
    asked = ", ".join(map(str, sorted({cell.params.gpu_count for cell in wider})))
    said = f"{len(wider)} cells ask for {asked} GPUs of one host together, and here no host has more than {most(None)}"
    if len(wider) == len(queue.cells):
        raise PlatformError(
            said, "Have such a host join (`ray start --address=…`), or --set gpus=1"
        )
    queue.defer(wider)
    say(f"left out: {said}. Given again where there are so many, this command measures them")


def describe_nice_levels(hosts: Sequence[HostInfo]) -> Iterator[str]:
    """Of each host where what measures waits for whatever else runs there."""
    for host in hosts:
        if host.nice > 0:
            yield (
                f"on {host.name} cells run at niceness {host.nice}, so that a busy neighbour slows them: "
                "begin without nice, and Ray with RAY_worker_niceness=0"
            )


def first_gpu(hosts: Sequence[HostInfo]) -> str | None:
    """By the name that its driver gives."""
    return next((str(gpu.name) for host in hosts for gpu in host.gpus), None)


def smallest_gpu(hosts: Sequence[HostInfo], kind: str | None = None) -> GpuModel | None:
    """Of the GPUs that a cell may come to, the one with the least memory."""
    gpus = [
        gpu for host in hosts for gpu in host.gpus if kind is None or matches_kind(gpu.name, kind)
    ]
    cards = [gpu_from_driver(gpu.name, gpu.memory_bytes) for gpu in gpus]
    return min(cards, key=lambda card: card.usable_bytes, default=None)


def require_devices(
    request: SweepRequest, devices: Iterable[str], hosts: Sequence[HostInfo]
) -> None:
    """Raises PlatformError where one of them is on no host."""
    have = sorted({device for host in hosts for device in host.devices})
    for device in sorted(set(devices).difference(have)):
        raise PlatformError(
            f"{request.source.name}: asks for device {device}, and here there is only {', '.join(have)}",
            f"Add --set device={have[0]} to measure there, or see `sweep doctor`",
        )


def check_gpu_kinds(
    queue: AttemptQueue,
    hosts: Sequence[HostInfo],
    slots: Mapping[str, int],
    notify: Callable[[str], None],
) -> None:
    """Exclude the cells whose kind of GPU is on no host; another run may measure them.

    slots: cells that can run at the same time, by kind of GPU.
    Raises PlatformError where that is all of them.
    """
    there = sorted({str(gpu.name) for host in hosts for gpu in host.gpus})
    for host in hosts if queue.kinds else ():
        if len({gpu.name for gpu in host.gpus}) > 1:
            raise PlatformError(
                f"gpu_kind: {host.name} has GPUs of several kinds, and only hosts are told apart",
                "Set CUDA_VISIBLE_DEVICES",
            )
    missing = [kind for kind, count in slots.items() if not count]
    if missing:
        left_out = [cell for cell in queue.cells if cell.params.gpu_kind in missing]
        said = f"{len(left_out)} cells ask for gpu_kind {', '.join(missing)}, and here there is {', '.join(there) or 'no GPU'}"
        remedy = "Have such a node join (`ray start --address=…`), or --set gpu_kind=A100, or whatever Ray calls what is here"
        if len(left_out) == len(queue.cells):
            raise PlatformError(said, remedy)
        queue.defer(left_out)
        notify(f"left out: {said}. Given again with it, this command measures them")
    elif not queue.kinds and len(there) > 1 and "cuda" in queue.devices:
        notify(
            f"GPUs of several kinds, {', '.join(there)}: cells come to any of them. --set gpu_kind=A,B has each on both"
        )


def require_one_kind_of_gpu(
    fingerprints: Mapping[str, Sequence[Mapping[str, Any]]], queue: AttemptQueue
) -> None:
    """What ran out of memory on one kind says nothing of another. Raises PlatformError."""
    kinds = sorted({str(mark.get("gpu")) for mark in fingerprints.get("cuda", [])})
    if len(kinds) > 1 and not queue.names_kinds:
        raise PlatformError(
            f"--infer-oom: there are GPUs of several kinds: {', '.join(kinds)}", "Leave it out"
        )
