"""Checks of the hosts before the first cell is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from orchestrator.common.errors import EnvironmentError
from orchestrator.hardware.gpu_catalog import GpuModel, gpu_from_driver, matches_kind
from orchestrator.planning.attempt_queue import Queue
from orchestrator.planning.request import Request


def exclude_wider_cells(
    queue: Queue, environments: Sequence[Mapping[str, Any]], say: Callable[[str], None]
) -> None:
    """Leaves the cells for another run that ask for more GPUs together than any host here has of their kind.

    Raises EnvironmentError where that is all of them.
    """

    def most(kind: str | None) -> int:
        hosts = (
            [gpu for gpu in here.get("gpus", []) if kind is None or matches_kind(gpu["name"], kind)]
            for here in environments
        )
        return max(map(len, hosts), default=0)

    wider = [
        cell for cell in queue.cells if cell.params.gpu_count > max(1, most(cell.params.gpu_kind))
    ]
    if not wider:
        return
    asked = ", ".join(map(str, sorted({cell.params.gpu_count for cell in wider})))
    said = f"{len(wider)} cells ask for {asked} GPUs of one host together, and here no host has more than {most(None)}"
    if len(wider) == len(queue.cells):
        raise EnvironmentError(
            said, "Have such a host join (`ray start --address=…`), or --set gpus=1"
        )
    queue.leave_to_another_run(wider)
    say(f"left out: {said}. Given again where there are so many, this command measures them")


def niced(environments: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Of each host where what measures waits for whatever else runs there."""
    for here in environments:
        if here.get("nice", 0) > 0:
            yield (
                f"on {here['host']} cells run at niceness {here['nice']}, so that a busy neighbour slows them: "
                "begin without nice, and Ray with RAY_worker_niceness=0"
            )


def first_gpu(environments: Sequence[Mapping[str, Any]]) -> str | None:
    """By the name that its driver gives."""
    return next((str(gpu["name"]) for here in environments for gpu in here.get("gpus", [])), None)


def smallest_card(
    environments: Sequence[Mapping[str, Any]], kind: str | None = None
) -> GpuModel | None:
    """Of the GPUs that a cell may come to, the one with the least memory."""
    gpus = [
        gpu
        for here in environments
        for gpu in here.get("gpus", [])
        if kind is None or matches_kind(gpu["name"], kind)
    ]
    cards = [gpu_from_driver(gpu["name"], gpu["memory_bytes"]) for gpu in gpus]
    return min(cards, key=lambda card: card.usable_bytes, default=None)


def require_devices(
    request: Request, devices: Iterable[str], environments: Sequence[Mapping[str, Any]]
) -> None:
    """Raises EnvironmentError where one of them is on no host."""
    have = sorted(
        {
            name
            for environment in environments
            for name, marks in environment["fingerprints"].items()
            if marks
        }
    )
    for device in sorted(set(devices).difference(have)):
        raise EnvironmentError(
            f"{request.source.name}: asks for device {device}, and here there is only {', '.join(have)}",
            f"Add --set device={have[0]} to measure there, or see `sweep doctor`",
        )


def check_gpu_kinds(
    queue: Queue,
    environments: Sequence[Mapping[str, Any]],
    slots: Mapping[str, int],
    notify: Callable[[str], None],
) -> None:
    """Exclude the cells whose kind of GPU is on no host; another run may measure them.

    slots: cells that can run at the same time, by kind of GPU.
    Raises EnvironmentError where that is all of them.
    """
    there = sorted({str(gpu["name"]) for here in environments for gpu in here.get("gpus", [])})
    for here in environments if queue.kinds else ():
        if len({gpu["name"] for gpu in here.get("gpus", [])}) > 1:
            raise EnvironmentError(
                f"gpu_kind: {here['host']} has GPUs of several kinds, and only hosts are told apart",
                "Set CUDA_VISIBLE_DEVICES",
            )
    missing = [kind for kind, count in slots.items() if not count]
    if missing:
        left_out = [cell for cell in queue.cells if cell.params.gpu_kind in missing]
        said = f"{len(left_out)} cells ask for gpu_kind {', '.join(missing)}, and here there is {', '.join(there) or 'no GPU'}"
        remedy = "Have such a node join (`ray start --address=…`), or --set gpu_kind=A100, or whatever Ray calls what is here"
        if len(left_out) == len(queue.cells):
            raise EnvironmentError(said, remedy)
        queue.leave_to_another_run(left_out)
        notify(f"left out: {said}. Given again with it, this command measures them")
    elif not queue.kinds and len(there) > 1 and "cuda" in queue.devices:
        notify(
            f"GPUs of several kinds, {', '.join(there)}: cells come to any of them. --set gpu_kind=A,B has each on both"
        )


def require_one_kind_of_gpu(
    fingerprints: Mapping[str, Sequence[Mapping[str, Any]]], queue: Queue
) -> None:
    """What ran out of memory on one kind says nothing of another. Raises EnvironmentError."""
    kinds = sorted({str(mark.get("gpu")) for mark in fingerprints.get("cuda", [])})
    if len(kinds) > 1 and not queue.names_kinds:
        raise EnvironmentError(
            f"--infer-oom: there are GPUs of several kinds: {', '.join(kinds)}", "Leave it out"
        )
