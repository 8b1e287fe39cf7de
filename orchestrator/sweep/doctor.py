"""What this machine can do, what is missing, and what to do about it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median, quantiles

from orchestrator.common.errors import PlatformError, SweepError
from orchestrator.common.provenance import describe_program, git_commit, program_source
from orchestrator.execution import nsys
from orchestrator.execution.host_probe import dispatch_rates, probe_here, profiler_failure
from orchestrator.hardware.host import HostInfo
from orchestrator.scheduling.ray_scheduler import RayScheduler
from orchestrator.store.remote_address import RunLocation, is_address
from orchestrator.store.remote_folder import RemoteFolder

_GIB = 1024**3
_TESTED_TORCH = ("2.11", "2.12", "2.13")
_LITTLE_DISK_GIB = 5
_WATCHED_S = 3.0  # a core of a virtual machine with an H200 was slow for 0.04 to 2 s on end
_SLOW = 0.75  # of the best pace: the two levels of 3,134 readings on such machines were 0.56 of each other
_SELDOM = 0.05


@dataclass(frozen=True)
class Diagnosis:
    """good: True, False, or None for what is good to know. remedy: what to do."""

    name: str
    good: bool | None
    said: str
    remedy: str = ""

    def __str__(self) -> str:
        mark = {True: "ok  ", False: "FAIL", None: "note"}[self.good]
        return f"{mark} {self.name:<8} {self.said}{f'. {self.remedy}' if self.remedy else ''}"


def examine(out: RunLocation) -> Iterator[Diagnosis]:
    """One finding after another, as each is known. out: where results would go."""
    try:
        host: HostInfo | None = probe_here()
    except PlatformError as error:
        yield Diagnosis("torch", False, error.message, "Reinstall it: pip install torch")
        host = None
    yield _program()
    if os.getpid() == 1:
        yield _first_process()
    if host is not None:
        for check in (_torch, _cuda, _gpus, _nvml, _cpu):
            yield check(host)
        if host.gpus:
            yield _profiler(profiler_failure())
        yield _host(dispatch_rates(_WATCHED_S))
    yield _ray()
    yield _nsys()
    yield _compiler()
    yield _place(str(out)) if is_address(out) else _disk(Path(out))


def _program() -> Diagnosis:
    return Diagnosis("program", True, describe_program(program_source(), git_commit()))


def _first_process() -> Diagnosis:
    # Orphans become children of process 1. Without an init nobody waits for them: a sweep leaves one
    # or two zombies a cell, and a container may hold a limited number of processes.
    message = "sweep is process 1 of its container, so that ended processes pile up as zombies"
    return Diagnosis("init", None, message, "Start the container with docker run --init")


def _torch(host: HostInfo) -> Diagnosis:
    tested = host.torch.startswith(_TESTED_TORCH)
    remedy = "" if tested else f"Tested are {', '.join(_TESTED_TORCH)}"
    return Diagnosis(
        "torch", True if tested else None, f"{host.torch} on Python {host.python}", remedy
    )


def _cuda(host: HostInfo) -> Diagnosis:
    if host.gpus:
        return Diagnosis("CUDA", True, f"{host.cuda}, cuDNN {host.cudnn}, driver {host.driver}")
    if host.cuda is None:
        return Diagnosis(
            "CUDA", None, "this torch is built without it", "Cells run with --set device=cpu"
        )
    return Diagnosis(
        "CUDA",
        None,
        f"torch has {host.cuda} but sees no GPU",
        "Check nvidia-smi and CUDA_VISIBLE_DEVICES",
    )


def _gpus(host: HostInfo) -> Diagnosis:
    said = ", ".join(f"{gpu.name} {gpu.memory_bytes / _GIB:.0f} GiB" for gpu in host.gpus)
    mps = "mps" in host.devices
    return Diagnosis("GPUs", bool(said or mps) or None, said or ("Apple MPS" if mps else "no GPU"))


def _nvml(host: HostInfo) -> Diagnosis:
    if host.driver:
        return Diagnosis("NVML", True, f"driver {host.driver}")
    return Diagnosis("NVML", None, host.driver_note, "Clocks, power and temperature will be null")


def _cpu(host: HostInfo) -> Diagnosis:
    return Diagnosis("CPU", True, f"{host.cpu}, {host.cores} cores")


def _host(paces: Sequence[float]) -> Diagnosis:
    """paces: one after another, on one core after the other."""
    best = quantiles(paces, n=20)[-1]
    slow = [pace for pace in paces if pace < _SLOW * best]
    if len(slow) <= _SELDOM * len(paces):
        return Diagnosis("host", True, f"launches {best:.0f} small operations a ms")
    said = (
        f"CPU speed is unsteady: in {len(slow) / len(paces):.0%} of {_WATCHED_S:.0f} s it launched work at "
        f"{median(slow) / best:.0%} of its full pace ({median(slow):.0f} of {best:.0f} small operations a ms), "
        "as when its cores are shared"
    )
    remedy = f"CPU-bound steps (†) may take up to {best / median(slow):.1f} times as long: docs/explanation/cpu-bound.md"
    return Diagnosis("host", None, said, remedy)


def _profiler(refused: str | None) -> Diagnosis:
    if refused is None:
        return Diagnosis("CUPTI", True, "the profiler sees the kernels of a GPU")
    remedy = (
        "The instruments `kernels` and `kernel_time` see nothing so: end what else profiles (nsys, ncu; DCGM: "
        "dcgmi profiling --pause), run a container with --cap-add SYS_ADMIN, or load the driver with "
        "NVreg_RestrictProfilingToAdminUsers=0"
    )
    return Diagnosis("CUPTI", None, refused, remedy)


def _ray() -> Diagnosis:
    try:
        said = f"{version('ray')}, starts here"
        RayScheduler(lambda message: None).close()
    except PackageNotFoundError:
        return Diagnosis("Ray", False, "is not installed", "pip install ray")
    except SweepError as error:
        return Diagnosis("Ray", False, error.message, error.remedy)
    return Diagnosis("Ray", True, said)


def _nsys() -> Diagnosis:
    found = nsys.program()
    remedy = (
        "" if found else "Only the instrument `nsys`, and `import-nsys` of a .nsys-rep, need it"
    )
    return Diagnosis("nsys", bool(found) or None, found or "not on the PATH", remedy)


def _compiler() -> Diagnosis:
    found = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
    remedy = "" if found else "torch.compile on the CPU needs one: install g++"
    return Diagnosis("C++", bool(found) or None, found or "no compiler", remedy)


def _place(address: str) -> Diagnosis:
    try:
        RemoteFolder(address).require_writable()
        return Diagnosis("bucket", True, f"{address} can be read and written")
    except SweepError as error:
        return Diagnosis("bucket", False, error.message, error.remedy)


def _disk(folder: Path) -> Diagnosis:
    place = next(
        parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists()
    )
    free = shutil.disk_usage(place).free / _GIB
    writable = place.is_dir() and os.access(place, os.W_OK)
    remedy = (
        ""
        if writable and free > _LITTLE_DISK_GIB
        else "Name a writable folder with --out, or free some space"
    )
    said = f"{free:.0f} GiB free at {place}" + ("" if writable else ", which cannot be written")
    return Diagnosis("disk", writable and free > _LITTLE_DISK_GIB, said, remedy)
