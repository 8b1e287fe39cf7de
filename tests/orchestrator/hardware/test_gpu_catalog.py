from __future__ import annotations

import pytest

from orchestrator.common.errors import ConfigError
from orchestrator.common.units import GIB, MIB
from orchestrator.hardware.gpu_catalog import driver_name, find_gpu, matches_kind


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("H100-SXM", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("A100-40GB", "A100 40GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("RTX4090", "RTX 4090"),
        ("rtx-4090", "RTX 4090"),
        ("3090", "RTX 3090"),
    ],
)
def test_a_gpu_is_found_by_its_drivers_name_and_by_other_spellings(name: str, gpu: str) -> None:
    assert find_gpu(name).name == gpu


@pytest.mark.parametrize(
    "name",
    [
        *("L4", "NVIDIA A10G", "Tesla V100-SXM2-16GB", "MI300X", "GH200", "RTX 3060", "H2000"),
        *("RTX 6000", "A100 20GB", "NVIDIA GeForce RTX 4090 Laptop GPU", "", "rtx", "0GiB"),
        "9" * 400 + "GiB",
    ],
)
def test_a_gpu_that_is_not_known_is_described_by_its_memory(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        find_gpu(name)
    assert refused.value.message.endswith(": is not known")
    assert refused.value.remedy == "Give its memory: --gpu 24GiB, or --set memory_limit_gib=24"


def test_a_name_of_several_gpus_is_a_question() -> None:
    with pytest.raises(ConfigError, match=r"Say which: A100 40GB, A100 80GB"):
        find_gpu("A100")


def test_a_memory_stands_for_any_gpu_of_this_size() -> None:
    gpu = find_gpu("24GiB")
    assert gpu.usable_bytes == 24 * GIB - 600 * MIB
    assert driver_name(gpu) is None


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("H100", "NVIDIA H100 80GB HBM3"),
        ("H100 PCIe", "NVIDIA H100 PCIe"),
        ("A100-40GB", "NVIDIA A100-SXM4-40GB"),
        ("T4", None),
    ],
)
def test_the_peaks_are_those_of_the_variant_that_is_named(name: str, device: str | None) -> None:
    assert driver_name(find_gpu(name)) == device


@pytest.mark.parametrize(
    ("device", "kind", "matches"),
    [
        ("GeForce-RTX-5090", "RTX 5090", True),
        ("NVIDIA GeForce RTX 4090", "rtx4090", True),
        ("T4", "Tesla T4", True),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB", True),
        ("NVIDIA A100-SXM4-80GB", "A100-40GB", False),
        ("NVIDIA H100 80GB HBM3", "H200", False),
        ("NVIDIA H100 80GB HBM3", "RTX", False),
        ("NVIDIA H100 80GB HBM3", "H100", True),
        ("NVIDIA H100 PCIe", "h100 pcie", True),
        ("NVIDIA H100 PCIe", "NVIDIA H100", True),
        ("NVIDIA H200", "H100", False),
        ("NVIDIA A100-SXM4-80GB", "A100", True),
        ("NVIDIA A1000", "A100", False),
        ("", "H100", False),
    ],
)
def test_a_gpu_of_a_cell_is_matched_by_the_same_words(
    device: str, kind: str, matches: bool
) -> None:
    assert matches_kind(device, kind) is matches
