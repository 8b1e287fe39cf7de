"""The checks of `sweep doctor`: what works on this machine, what is missing, and the remedy."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryFile

from orchestrator.common.errors import PlatformError, SweepError
from orchestrator.common.files import try_lock, writing
from orchestrator.common.provenance import describe_program, git_commit, program_source
from orchestrator.common.run_location import RunLocation, is_address
from orchestrator.common.units import GIB
from orchestrator.execution import nsys
from orchestrator.execution.host_probe import dispatch_rates, probe_here, profiler_failure
from orchestrator.hardware.gpu_catalog import link_peak_gb_s
from orchestrator.hardware.host import HostInfo, visible_gpu_uuids
from orchestrator.hardware.links import describe_links
from orchestrator.scheduling.ray_scheduler import RayScheduler
from orchestrator.store.remote_folder import RemoteFolder

_TESTED_TORCH = ("2.11", "2.12", "2.13")
_MIN_DISK_GIB = 5
# The cores of a virtual machine with an H200 were slow for 0.04 to 2 s at a time.
_RATE_DURATION_S = 3.0
# On such machines, 3,134 readings had two levels, the lower one at 0.56 of the upper one.
_SLOW = 0.75  # of the best rate
_RARE = 0.05  # share of slow readings that is ignored


@dataclass(frozen=True)
class Diagnosis:
    """A line of `sweep doctor`. good: None if the finding is no failure, but worth a note."""

    name: str
    good: bool | None
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        mark = {True: "ok  ", False: "FAIL", None: "note"}[self.good]
        text = ". ".join(filter(None, [self.message, self.remedy]))
        return f"{mark} {self.name:<8} {text}"


def examine(out: RunLocation) -> Iterator[Diagnosis]:
    """Yield each diagnosis as it is known. out: the folder or address for results."""
    try:
        host: HostInfo | None = probe_here()
    except PlatformError as error:
        yield Diagnosis("torch", False, error.message, "Reinstall it: pip install torch")
        host = None
    yield Diagnosis("program", True, describe_program(program_source(), git_commit()))
    if os.getpid() == 1:
        # Orphans become children of process 1. Without an init nobody waits for them: a sweep
        # leaves one or two zombies a cell, and a container may hold few processes.
        message = "sweep is process 1 of its container, so that ended processes pile up as zombies"
        yield Diagnosis("init", None, message, "Start the container with docker run --init")
    if host is not None:
        for check in (_torch, _cuda, _gpus, _nvml):
            yield check(host)
        if len(host.gpus) > 1:
            yield _links(host)
        yield from _bytecode()
        yield Diagnosis("CPU", True, f"{host.cpu}, {host.cores} cores")
        if host.gpus:
            yield _profiler(profiler_failure())
        yield _host(dispatch_rates(_RATE_DURATION_S))
    for check_program in (_ray, _nsys, _compiler):
        yield check_program()
    yield _bucket(str(out)) if is_address(out) else _disk(Path(out))


def _torch(host: HostInfo) -> Diagnosis:
    message = f"{host.torch} on Python {host.python}"
    if host.torch.startswith(_TESTED_TORCH):
        return Diagnosis("torch", True, message)
    return Diagnosis("torch", None, message, f"Tested are {', '.join(_TESTED_TORCH)}")


def _bytecode() -> Iterator[Diagnosis]:
    """Yield a note if torch has no bytecode and Python may not write it."""
    # Images of containers often hold torch without it (`pip install --no-compile`).
    found = find_spec("torch")
    if sys.pycache_prefix is not None or found is None or found.origin is None:
        return
    file = Path(cache_from_source(found.origin))
    is_writable = not sys.dont_write_bytecode and os.access(file.parent.parent, os.W_OK)
    if not (file.exists() or is_writable):
        # On two cores, a CUDA build of torch 2.11 and the part of its compiler that an optimizer
        # imports took 9 to 11 s of CPU time without it and 3.3 s with it.
        message = "torch has no bytecode, so that each process compiles 80 MB of it again"
        remedy = "export PYTHONPYCACHEPREFIX=~/.cache/bytecode; unset PYTHONDONTWRITEBYTECODE"
        yield Diagnosis("bytecode", None, message, remedy)


def _cuda(host: HostInfo) -> Diagnosis:
    if host.gpus:
        return Diagnosis("CUDA", True, f"{host.cuda}, cuDNN {host.cudnn}, driver {host.driver}")
    if host.cuda is None:
        message, remedy = "this torch is built without it", "Cells run with --set device=cpu"
    else:
        message = f"torch has {host.cuda} but sees no GPU"
        remedy = "Check nvidia-smi and CUDA_VISIBLE_DEVICES"
    return Diagnosis("CUDA", None, message, remedy)


def _gpus(host: HostInfo) -> Diagnosis:
    names = [f"{gpu.name} {gpu.memory_bytes / GIB:.0f} GiB" for gpu in host.gpus]
    if not names and host.fingerprints.get("mps"):
        names = ["Apple MPS"]
    return Diagnosis("GPUs", bool(names) or None, ", ".join(names) or "no GPU")


def _nvml(host: HostInfo) -> Diagnosis:
    if host.driver:
        return Diagnosis("NVML", True, f"driver {host.driver}")
    return Diagnosis("NVML", None, host.driver_note, "Clocks, power and temperature will be null")


def _links(host: HostInfo) -> Diagnosis:
    links = describe_links(list(visible_gpu_uuids(host).values()))
    peak = link_peak_gb_s(links)
    if peak is None:
        return Diagnosis("links", None, links, "The column of_link will be null")
    slowest = "the slowest pair" if "; " in links else "each pair"
    return Diagnosis("links", True, f"{links}: {peak:.4g} GB/s each way for {slowest}")


def _host(rates: Sequence[float]) -> Diagnosis:
    """Check the speed of the CPU. rates: small operations per ms, one core after another."""
    best = quantiles(rates, n=20)[-1]
    slow = [rate for rate in rates if rate < _SLOW * best]
    if len(slow) <= _RARE * len(rates):
        return Diagnosis("host", True, f"the CPU starts {best:.0f} small operations per ms")
    slow_rate = median(slow)
    message = (
        f"CPU speed is unsteady: in {len(slow) / len(rates):.0%} of {_RATE_DURATION_S:.0f} s it "
        f"started {slow_rate:.0f} instead of {best:.0f} small operations per ms"
        f" ({slow_rate / best:.0%}), as when its cores are shared"
    )
    remedy = (
        f"CPU-bound steps (†) may take up to {best / slow_rate:.1f} times as long: "
        "docs/explanation/cpu-bound.md"
    )
    return Diagnosis("host", None, message, remedy)


def _profiler(failure: str | None) -> Diagnosis:
    if failure is None:
        return Diagnosis("CUPTI", True, "the profiler sees the kernels of a GPU")
    remedy = (
        "The instruments `kernels` and `kernel_time` record nothing: end other profilers (nsys, "
        "ncu; DCGM: dcgmi profiling --pause), run a container with --cap-add SYS_ADMIN, or load "
        "the driver with NVreg_RestrictProfilingToAdminUsers=0"
    )
    return Diagnosis("CUPTI", None, failure, remedy)


def _ray() -> Diagnosis:
    try:
        message = f"{version('ray')}, starts here"
        RayScheduler(lambda notice: None).close()
    except PackageNotFoundError:
        return Diagnosis("Ray", False, "is not installed", "pip install ray")
    except SweepError as error:
        return Diagnosis("Ray", False, error.message, error.remedy)
    return Diagnosis("Ray", True, message)


def _nsys() -> Diagnosis:
    if program := nsys.program():
        return Diagnosis("nsys", True, program)
    remedy = "Only the instrument `nsys`, and `sweep import` of a .nsys-rep, need it"
    return Diagnosis("nsys", None, "not on the PATH", remedy)


def _compiler() -> Diagnosis:
    for name in ("g++", "clang++", "c++"):
        if program := shutil.which(name):
            return Diagnosis("C++", True, program)
    return Diagnosis("C++", None, "no compiler", "torch.compile on the CPU needs one: install g++")


def _bucket(address: str) -> Diagnosis:
    try:
        RemoteFolder(address).require_writable()
    except SweepError as error:
        return Diagnosis("bucket", False, error.message, error.remedy)
    return Diagnosis("bucket", True, f"{address} can be read and written")


def _disk(folder: Path) -> Diagnosis:
    asked = folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    free_gib = shutil.disk_usage(folder).free / GIB
    message = f"{free_gib:.0f} GiB free at {folder}"
    is_writable = folder.is_dir() and os.access(folder, os.W_OK)
    if not is_writable:
        message += ", which cannot be written"
    elif problem := _lock_problem(folder):
        return Diagnosis("disk", False, problem.message, problem.remedy)
    elif free_gib > _MIN_DISK_GIB and asked.parent != folder != asked:
        message = f"{asked.parent} does not exist; {message}, where it would be created"
        return Diagnosis("disk", None, message, "Check the name of --out")
    elif free_gib > _MIN_DISK_GIB:
        return Diagnosis("disk", True, message)
    remedy = "Name a writable folder with --out, or free some space"
    return Diagnosis("disk", False, message, remedy)


def _lock_problem(folder: Path) -> SweepError | None:
    """Return the error of a folder whose files cannot be locked, or None."""
    try:
        with writing(folder), TemporaryFile(dir=folder) as file:
            try_lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB, folder)
    except SweepError as error:
        return error
    return None
