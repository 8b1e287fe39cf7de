"""Knowledge about a sweep before its first cell is measured, and the checks of its hosts.

A check takes a `Preflight` and returns another one, for example without the cells that no host can
measure. It raises PlatformError if nothing could be measured. `check_fingerprints` raises RunMismatch
if the results in the folder were measured on other hardware or with other software. A new check is one function and one entry of CHECKS, NSYS_CHECKS or GPU_CHECKS.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from orchestrator.common.errors import PlatformError
from orchestrator.common.output import Notify
from orchestrator.common.text import cells_and_verb
from orchestrator.hardware.gpu_catalog import GpuModel, gpu_from_driver, matches_kind
from orchestrator.hardware.host import (
    Fingerprint,
    Fingerprints,
    HostInfo,
    gpu_counts,
    gpus_of,
    require_compatible,
    unique_fingerprints,
)
from orchestrator.planning.cell_decisions import most_gpus
from orchestrator.planning.request import SweepRequest
from orchestrator.store.run import Run
from tasks.spec.cell import Cell, device_types

if TYPE_CHECKING:
    from orchestrator.planning.prediction_requests import PredictedCell


@dataclass(frozen=True)
class Exclusion:
    """A cell that this sweep does not measure after all.

    is_deferred: the same command measures it on other hosts. Otherwise this command leaves it out
        on purpose, for example by --skip-predicted-oom.
    """

    cell: Cell
    is_deferred: bool


@dataclass(frozen=True)
class Slots:
    """Number of cells that can run at the same time, by device type and by kind of GPU.

    The scheduler counts them. Without Ray, a single cell runs at a time, whatever the number of GPUs.
    """

    by_device: Mapping[str, int] = field(default_factory=dict)
    by_gpu_kind: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Preflight:
    """Everything that is known about a sweep before its first cell is measured.

    cells: the cells to measure, each once. Those in `excluded` are not among them.
    has_results: the folder of the run has results already. Unless the user passes --mixed, new ones
        must come from the same hardware and software.
    predictions: the predicted memory by cell id. A cell that cannot be predicted has no entry.
    """

    cells: tuple[Cell, ...] = ()
    hosts: tuple[HostInfo, ...] = ()
    slots: Slots = field(default_factory=Slots)
    has_results: bool = False
    excluded: tuple[Exclusion, ...] = ()
    fingerprints: Fingerprints = field(default_factory=dict)
    predictions: Mapping[str, PredictedCell] = field(default_factory=dict)

    @property
    def gpu_kinds(self) -> list[str]:
        """The values of `gpu_kind` in the cells, such as `H100`."""
        return sorted({cell.params.gpu_kind for cell in self.cells if cell.params.gpu_kind})

    @property
    def gpu_names(self) -> list[str]:
        """The names that the drivers of the hosts give their GPUs, each once."""
        return sorted({gpu.name for host in self.hosts for gpu in host.gpus})

    @property
    def names_every_gpu_kind(self) -> bool:
        """True if each cell on a GPU, if there are any, names the kind that it runs on."""
        return all(cell.params.gpu_kind for cell in self.cells if cell.params.device == "cuda")

    def exclude(self, cells: Collection[Cell], *, is_deferred: bool) -> Preflight:
        """Return the preflight without these cells."""
        excluded, left = list(self.excluded), []
        for cell in self.cells:
            if cell in cells:
                excluded.append(Exclusion(cell, is_deferred))
            else:
                left.append(cell)
        return replace(self, cells=tuple(left), excluded=tuple(excluded))


Check = Callable[[SweepRequest, Preflight, Notify], Preflight]


def check_nice_level(request: SweepRequest, preflight: Preflight, notify: Notify) -> Preflight:
    """Warn of hosts where cells wait for other programs."""
    for host in preflight.hosts:
        if host.nice > 0:
            notify(
                f"cells on {host.name} run at niceness {host.nice}: other programs slow them down."
                " Start without nice, and Ray with RAY_worker_niceness=0"
            )
    return preflight


def check_devices(request: SweepRequest, preflight: Preflight, notify: Notify) -> Preflight:
    """Require each device type of the cells on at least one host."""
    found = {
        device for host in preflight.hosts for device, kinds in host.fingerprints.items() if kinds
    }
    available = sorted(found)
    for device in device_types(preflight.cells):
        if device in available:
            continue
        words = f"--set device={available[0]}"
        if available[0] == "cpu" and any(cell.params.gpu_count > 1 for cell in preflight.cells):
            words += " --set processes=2"
        raise PlatformError(
            f"{request.config_path}: device {device} is not available"
            f" (available: {', '.join(available)})",
            f"Add {words} to measure there, or see `sweep doctor`",
        )
    return preflight


def check_fingerprints(request: SweepRequest, preflight: Preflight, notify: Notify) -> Preflight:
    """Require that the hosts agree in hardware and software with the results in the folder, if any.

    With --mixed they may differ. The returned preflight has the fingerprints of both.
    """
    known = known_fingerprints(request.run) if preflight.has_results else {}
    fingerprints = dict(known)
    for device in device_types(preflight.cells):
        before = known.get(device, ())
        current: list[Fingerprint] = []
        for host in preflight.hosts:
            current += host.fingerprints.get(device, ())
        if before and not request.execution.allow_mixed:
            # If each cell names its kind of GPU, several kinds in one run cannot be confused.
            require_compatible(before, current, request.run, any_gpu=preflight.names_every_gpu_kind)
        fingerprints[device] = unique_fingerprints([*before, *current])
    return replace(preflight, fingerprints=fingerprints)


def known_fingerprints(run: Run) -> Fingerprints:
    """Return the fingerprints in run.json, or those in the rows if run.json was lost."""
    stored: Fingerprints | None = run.read_manifest().get("fingerprints")
    if stored is not None:
        return stored
    found: dict[str, list[Fingerprint]] = {}
    rows = run.rows("attempts", ["started_at", "params", "facts"])
    for _, params, facts in sorted(rows, key=lambda row: str(row[0])):
        device = json.loads(params).get("device")
        fingerprint = json.loads(facts).get("fingerprint")
        if device and fingerprint:
            found[device] = unique_fingerprints([*found.get(device, ()), fingerprint])
    return found


def check_gpu_kinds(request: SweepRequest, preflight: Preflight, notify: Notify) -> Preflight:
    """Leave cells whose kind of GPU is on no host to a later run."""
    kinds, names = preflight.gpu_kinds, ", ".join(preflight.gpu_names)
    if not kinds:
        if len(preflight.gpu_names) > 1 and "cuda" in device_types(preflight.cells):
            notify(
                f"there are GPUs of several kinds ({names}), and a cell may run on any of them."
                " --set gpu_kind=A,B measures each cell on each kind"
            )
        return preflight
    _require_one_kind_per_host(preflight.hosts)
    missing = [kind for kind in kinds if not preflight.slots.by_gpu_kind.get(kind)]
    cells = {cell for cell in preflight.cells if cell.params.gpu_kind in missing}
    problem = (
        f"{cells_and_verb(len(cells), 'needs', 'need')} gpu_kind {', '.join(missing)},"
        f" which no host has (available: {names or 'no GPU'})"
    )
    remedy = (
        "Add such a node (`ray start --address=…`),"
        " or name a kind that is available, such as --set gpu_kind=A100"
    )
    return _defer(preflight, cells, PlatformError(problem, remedy), notify)


def check_gpu_count(request: SweepRequest, preflight: Preflight, notify: Notify) -> Preflight:
    """Leave cells that need more GPUs than any host has to a later run."""
    cells, lacking = set(), set()
    host_gpus = gpu_counts(preflight.hosts)
    for cell in preflight.cells:
        needed, kind = cell.params.gpu_count, cell.params.gpu_kind
        # That there is no GPU at all is what `check_devices` and `check_gpu_kinds` report.
        if needed <= 1:
            continue
        available = most_gpus(host_gpus, cell)
        if needed > available:
            cells.add(cell)
            lacking.add(f"{needed} GPUs{f' of kind {kind}' if kind else ''} (at most {available})")
    if not cells:
        return preflight
    needing = cells_and_verb(len(cells), "needs", "need")
    problem = f"{needing} more GPUs than one host has: {', '.join(sorted(lacking))}"
    remedy = "Add such a node (`ray start --address=…`), or name fewer with --set gpus"
    return _defer(preflight, cells, PlatformError(problem, remedy), notify)


def check_inferred_oom(request: SweepRequest, preflight: Preflight, notify: Notify) -> Preflight:
    """Refuse --infer-oom if a cell may run on GPUs of several kinds.

    That one cell ran out of memory on one kind of GPU says nothing about other kinds.
    """
    if not request.options.infer_oom or preflight.names_every_gpu_kind:
        return preflight
    kinds = sorted(gpus_of(preflight.fingerprints.get("cuda", ())))
    if len(kinds) > 1:
        raise PlatformError(
            f"--infer-oom: these cells run or ran on GPUs of several kinds: {', '.join(kinds)}",
            "Leave it out",
        )
    return preflight


def check_nsys(request: SweepRequest, preflight: Preflight, notify: Notify) -> Preflight:
    """Warn if Nsight Systems is to trace the cells and is not installed here."""
    from orchestrator.execution import nsys

    if not nsys.program():
        notify(
            "nsys is not on the PATH here: on hosts without it, cells are measured but not traced"
        )
    return preflight


CHECKS: tuple[Check, ...] = (check_nice_level, check_devices, check_fingerprints)
NSYS_CHECKS: tuple[Check, ...] = (check_nsys,)  # of a sweep with that instrument
# Of a sweep with cells on CUDA. Fingerprints are compared before, for all cells: some may be left
# to a later run, and `check_inferred_oom` needs the fingerprints.
GPU_CHECKS: tuple[Check, ...] = (check_gpu_kinds, check_gpu_count, check_inferred_oom)


def first_gpu(hosts: Sequence[HostInfo]) -> str | None:
    """Return the name of a GPU as its driver reports it, or None without a GPU."""
    return next((gpu.name for host in hosts for gpu in host.gpus), None)


def smallest_gpu(hosts: Sequence[HostInfo], kind: str | None = None) -> GpuModel | None:
    """Return the GPU of this kind, or of any, with the least memory. None if there is no such GPU."""
    gpus = [gpu for host in hosts for gpu in host.gpus if matches_kind(gpu.name, kind)]
    models = [gpu_from_driver(gpu.name, gpu.memory_bytes) for gpu in gpus]
    return min(models, key=lambda model: model.usable_bytes, default=None)


def _defer(
    preflight: Preflight, cells: set[Cell], error: PlatformError, notify: Notify
) -> Preflight:
    """Leave cells to a later run on other hosts, or raise the error if no cell would remain."""
    if not cells:
        return preflight
    if len(cells) == len(preflight.cells):
        raise error
    notify(f"skipped: {error.message}. The same command measures them on such a host")
    return preflight.exclude(cells, is_deferred=True)


def _require_one_kind_per_host(hosts: Sequence[HostInfo]) -> None:
    # Ray labels nodes, not GPUs: it could start a cell on a GPU of the other kind.
    for host in hosts:
        if len({gpu.name for gpu in host.gpus}) > 1:
            raise PlatformError(
                f"gpu_kind: {host.name} has GPUs of several kinds, and a cell can be assigned"
                " to a host only",
                "Set CUDA_VISIBLE_DEVICES to the GPUs of one kind",
            )
