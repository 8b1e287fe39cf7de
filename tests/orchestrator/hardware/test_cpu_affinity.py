"""Which cores a GPU's cells have to themselves, on hosts that are sets of numbers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pynvml
import pytest

from orchestrator.execution.measurement import Slot
from orchestrator.hardware import cpu_affinity as cores
from orchestrator.hardware import nvml
from orchestrator.hardware.cpu_affinity import cores_for, divide_cores, parse_cores
from orchestrator.hardware.host import GpuInfo, HostInfo, visible_gpu_uuids
from tasks.spec.attempt import Attempt, read_attempt


def span(low: int, high: int) -> frozenset[int]:
    return frozenset(range(low, high))


def single(count: int) -> list[frozenset[int]]:
    return [frozenset({core}) for core in range(count)]


def test_each_gpu_has_an_equal_share_of_its_node() -> None:
    nodes = {"0": span(0, 8), "1": span(0, 8), "2": span(8, 16), "3": span(8, 16)}
    shares = divide_cores(span(0, 16), nodes, single(16))
    assert shares == {
        "0": (0, 1, 2, 3),
        "1": (4, 5, 6, 7),
        "2": (8, 9, 10, 11),
        "3": (12, 13, 14, 15),
    }


def test_threads_of_one_core_stay_together() -> None:
    pairs = [frozenset({core, core + 4}) for core in range(4)]
    assert divide_cores(span(0, 8), {"0": None, "1": None}, [*pairs, *pairs]) == {
        "0": (0, 1, 4, 5),
        "1": (2, 3, 6, 7),
    }


@pytest.mark.parametrize(
    "near",
    [
        {"0": None, "1": span(4, 8)},  # of one nothing is known
        {"0": span(0, 6), "1": span(4, 8)},  # nodes that overlap are none
        {"0": span(0, 4), "1": span(90, 99)},  # a node of which we may use nothing
    ],
)
def test_without_usable_numa_nodes_gpus_divide_all_cores_equally(
    near: dict[str, frozenset[int] | None],
) -> None:
    assert divide_cores(span(0, 8), near, single(8)) == {"0": (0, 1, 2, 3), "1": (4, 5, 6, 7)}


def test_one_gpu_is_pinned_to_its_node_unless_it_is_unknown_or_has_all_cores() -> None:
    assert divide_cores(span(0, 8), {"0": span(0, 4)}, single(8)) == {"0": (0, 1, 2, 3)}
    assert divide_cores(span(0, 8), {"0": span(0, 8)}, single(8)) == {"0": None}
    assert divide_cores(span(0, 8), {"0": None}, single(8)) == {"0": None}


def test_gpus_get_equal_numbers_of_cores_or_none_if_there_are_too_few() -> None:
    assert divide_cores(span(0, 2), dict.fromkeys("abc"), single(2)) == dict.fromkeys("abc")
    assert divide_cores(span(0, 5), {"a": None, "b": None}, single(5)) == {"a": (0, 1), "b": (2, 3)}


def test_lists_of_cores() -> None:
    assert parse_cores("0-2,8,10-11\n") == {0, 1, 2, 8, 10, 11}


def test_only_known_gpus_get_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)), raising=False)
    monkeypatch.setattr(cores, "near_cores", lambda uuid: None)
    monkeypatch.setattr(cores, "_hyper_threads", lambda core: frozenset({core}))
    assert cores_for("1", {"0": "a", "1": "b"}) == (2, 3)
    assert cores_for("MIG-7", {"0": "a", "1": "b"}) is None


@pytest.mark.parametrize(
    ("named", "names"),
    [(None, ["0", "1"]), ("3,5", ["3", "5"]), ("GPU-a,GPU-b", ["GPU-a", "GPU-b"])],
)
def test_gpus_by_the_names_that_they_have_for_cuda(named: str | None, names: list[str]) -> None:
    host = HostInfo(gpus=(GpuInfo("", 0, "a"), GpuInfo("", 0, "b")), visible_devices=named)
    assert visible_gpu_uuids(host) == dict(zip(names, ["a", "b"], strict=True))
    assert visible_gpu_uuids(HostInfo()) == {}


def test_a_pinned_cell_computes_and_compiles_on_as_many_threads(
    make_attempt: Callable[..., Attempt],
) -> None:
    attempt = make_attempt(settings={"env": {"A": "1"}})
    free, pinned = Slot(16).place(attempt), Slot(16, (4, 5, 6)).place(attempt)
    assert [placed.settings.cores for placed in (free, pinned)] == [None, (4, 5, 6)]
    assert free.settings.env == {"OMP_NUM_THREADS": "16", "A": "1"}
    threads = {"OMP_NUM_THREADS": "3", "TORCHINDUCTOR_COMPILE_THREADS": "3"}
    assert pinned.settings.env == {**threads, "A": "1"}
    assert read_attempt(pinned.to_json()) == pinned


def driver(**answers: Any) -> dict[str, Callable[..., Any]]:
    return {"nvmlInit": lambda: None, "nvmlDeviceGetHandleByUUID": lambda uuid: uuid, **answers}


def test_core_masks_of_the_gpu_driver_become_core_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, answer in driver(nvmlDeviceGetCpuAffinity=lambda gpu, words: [0b1011, 0b1]).items():
        monkeypatch.setattr(pynvml, name, answer)
    assert nvml.near_cores("a") == {0, 1, 3, 64}


def test_a_driver_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*asked: Any) -> Any:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    for name, answer in driver(nvmlDeviceGetCpuAffinity=refuse, nvmlDeviceGetCount=refuse).items():
        monkeypatch.setattr(pynvml, name, answer)
    assert nvml.near_cores("a") is None
    assert nvml.gpu_names() == []


def test_nvml_lists_the_gpus_that_cuda_visible_devices_selects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def by_index(index: int) -> int:
        if index > 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return index

    def by_uuid(uuid: str) -> str:
        if not uuid.startswith("MIG-"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    answers: dict[str, Any] = {
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": by_index,
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetUUID": lambda gpu: ("GPU-aa", "GPU-bb")[gpu],
        "nvmlDeviceGetName": lambda gpu: f"GPU {gpu}",
    }
    for name, answer in driver(**answers).items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert nvml.gpu_names() == ["GPU 0", "GPU 1"]
    for visible, seen in {
        "1": ["GPU 1"], "1,0": ["GPU 1", "GPU 0"], "": [], "0,7,1": ["GPU 0"], "-1": [], "b": [], "MIG-1": ["GPU MIG-1"],
        "GPU-b": ["GPU 1"], "GPU-": [], "GPU-x,0": [], " 1 , GPU-aa": ["GPU 1", "GPU 0"],
    }.items():  # fmt: skip
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert nvml.gpu_names() == seen
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b,0")
    assert nvml.gpu_uuids() == {"GPU-b": "GPU-bb", "0": "GPU-aa"}
