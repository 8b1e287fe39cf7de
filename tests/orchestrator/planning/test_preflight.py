"""The checks before the first cell: what they exclude, refuse and report, on hosts that are values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.common.errors import PlatformError, RunMismatch
from orchestrator.hardware.host import GpuInfo, HostInfo
from orchestrator.planning.invocation import RunOptions
from orchestrator.planning.preflight import (
    CHECKS,
    GPU_CHECKS,
    Preflight,
    Slots,
    check_devices,
    check_fingerprints,
    check_gpu_kinds,
    check_inferred_oom,
    check_nice_level,
    first_gpu,
    smallest_gpu,
)
from orchestrator.planning.request import SweepRequest
from tests.support.fake_sweep import CONFIG, CPU, FakeScheduler, go, outcome_of, request_for

GIB = 1024**3
ON_GPU = CONFIG.replace("device: cpu", "device: cuda")
EACH_KIND = ON_GPU.replace("axes: {", "axes: {gpu_kind: [H100, A100], ")
H100, A100 = GpuInfo("NVIDIA H100", 80 * GIB, "1"), GpuInfo("NVIDIA A100", 40 * GIB, "2")


def host(*gpus: GpuInfo, name: str = "a", nice: int = 0) -> HostInfo:
    fingerprints = {"cpu": [CPU], "cuda": [{"gpu": gpu.name} for gpu in gpus]}
    return HostInfo(name=name, gpus=gpus, fingerprints=fingerprints, nice=nice)


@pytest.fixture
def request_of(write_config: Callable[..., Path], tmp_path: Path) -> Callable[..., SweepRequest]:
    return lambda text=CONFIG, **more: request_for(write_config(text), out=tmp_path / "out", **more)


def preflight(request: SweepRequest, *hosts: HostInfo, **more: Any) -> Preflight:
    return Preflight(request.expansion.cells, hosts, **more)


def test_all_checks_leave_a_host_that_has_everything_as_it_is(
    request_of: Callable[..., SweepRequest],
) -> None:
    request, messages = request_of(), list[str]()
    state = before = preflight(request, host())
    for check in (*CHECKS, *GPU_CHECKS):
        state = check(request, state, messages.append)
    assert (state.cells, state.excluded, messages) == (before.cells, (), [])
    assert state.fingerprints == {"cpu": [CPU]}


def test_a_low_priority_is_reported_for_each_host(request_of: Callable[..., SweepRequest]) -> None:
    messages: list[str] = []
    request = request_of()
    hosts = host(nice=15), host(name="b")
    check_nice_level(request, preflight(request, *hosts), messages.append)
    assert [message.split(":")[0] for message in messages] == ["cells on a run at niceness 15"]


def test_a_device_type_that_no_host_has_is_refused(request_of: Callable[..., SweepRequest]) -> None:
    request = request_of(ON_GPU)
    with pytest.raises(PlatformError, match=r"device cuda is not available \(available: cpu\)"):
        check_devices(request, preflight(request, host()), print)
    check_devices(request, preflight(request, host(), host(H100)), print)


def test_cells_of_a_kind_that_is_missing_are_deferred(
    request_of: Callable[..., SweepRequest],
) -> None:
    request, messages = request_of(EACH_KIND), list[str]()
    slots = Slots({"cuda": 1}, {"H100": 1, "A100": 0})
    state = preflight(request, host(H100), slots=slots)
    state = check_gpu_kinds(request, state, messages.append)
    assert {cell.params.gpu_kind for cell in state.cells} == {"H100"}
    assert [one.is_deferred for one in state.excluded] == [True] * 4
    assert messages == [
        "skipped: 4 cells need gpu_kind A100, which no host has (available: NVIDIA H100)."
        " The same command measures them on such a host"
    ]


def test_no_cell_left_for_these_gpus_is_an_error(request_of: Callable[..., SweepRequest]) -> None:
    request = request_of(EACH_KIND)
    state = preflight(request, host(), slots=Slots({}, {"H100": 0, "A100": 0}))
    with pytest.raises(PlatformError, match=r"8 cells need gpu_kind A100, H100.*no GPU"):
        check_gpu_kinds(request, state, print)


def test_kinds_of_gpu_are_told_apart_by_host_alone(request_of: Callable[..., SweepRequest]) -> None:
    request, messages = request_of(EACH_KIND), list[str]()
    slots = Slots({"cuda": 2}, {"H100": 1, "A100": 1})
    with pytest.raises(PlatformError, match=r"a has GPUs of several kinds"):
        check_gpu_kinds(request, preflight(request, host(H100, A100), slots=slots), print)
    any_kind = request_of(ON_GPU)
    state = preflight(any_kind, host(H100), host(A100))
    assert check_gpu_kinds(any_kind, state, messages.append) == state
    assert messages[0].startswith("there are GPUs of several kinds (NVIDIA A100, NVIDIA H100)")


@pytest.mark.parametrize("text", [ON_GPU, EACH_KIND])
def test_memory_is_inferred_across_kinds_only_if_each_cell_names_its_kind(
    text: str, request_of: Callable[..., SweepRequest]
) -> None:
    request = replace(request_of(text), options=RunOptions(infer_oom=True))
    fingerprints = {"cuda": [{"gpu": "A100"}, {"gpu": "H100"}]}
    state = preflight(request, host(H100), host(A100), fingerprints=fingerprints)
    if text == ON_GPU:
        with pytest.raises(PlatformError, match=r"--infer-oom.*A100, H100"):
            check_inferred_oom(request, state, print)
    else:
        assert check_inferred_oom(request, state, print) == state


def test_fingerprints_are_compared_only_with_results(
    request_of: Callable[..., SweepRequest],
) -> None:
    request = request_of()
    go(request, FakeScheduler(outcome_of))
    other = {**CPU, "torch": "2.11.0"}
    hosts = (HostInfo(fingerprints={"cpu": [other]}),)
    state = Preflight(request.expansion.cells, hosts, has_results=True)
    with pytest.raises(RunMismatch, match=r"torch 2\.13\.0 \(here 2\.11\.0\)"):
        check_fingerprints(request, state, print)
    empty = Preflight(request.expansion.cells, hosts)
    assert check_fingerprints(request, empty, print).fingerprints == {"cpu": [other]}


def test_the_smallest_gpu_is_that_of_the_kind() -> None:
    hosts = [host(), host(H100), host(A100)]
    assert smallest_gpu(hosts).name == "NVIDIA A100"
    assert smallest_gpu(hosts, "H100").name == "NVIDIA H100"
    assert smallest_gpu([host()]) is None
    assert (first_gpu(hosts), first_gpu([host()])) == ("NVIDIA H100", None)
