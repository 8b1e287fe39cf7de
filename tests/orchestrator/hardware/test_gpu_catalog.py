from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from orchestrator.common.errors import ConfigError
from orchestrator.common.units import GIB, MIB
from orchestrator.hardware import gpu_catalog
from orchestrator.hardware.gpu_catalog import (
    find_gpu,
    gpu_from_driver,
    matches_kind,
    peak_tflops,
)

CARDS = tomllib.loads(Path(gpu_catalog.__file__).with_name("gpus.toml").read_text())["card"]


def test_every_card_has_its_sources_and_is_found_by_all_its_names() -> None:
    for card in CARDS:
        check_card(card)


def check_card(card: dict[str, Any]) -> None:
    source = card["memory_source"]
    # A page, but no search; or words of the output, which name the GPU's memory.
    is_page = source.startswith("https://") and "/search" not in source
    in_output = (str(card["memory_mib"]), str(card["memory_mib"] * MIB))
    assert is_page or any(memory in source for memory in in_output)
    has_peak = any(key in card for key in ("fp32", "tf32", "fp16", "bf16"))
    assert has_peak == card.get("peak_source", "").startswith("https://")
    has_others = "other_sizes" in card
    assert has_others == card.get("other_sizes_source", "").startswith("https://")
    name, devices = card["name"], card["devices"]
    for spelling in (name, name.lower(), name.replace(" ", "-"), name.replace(" ", "_")):
        assert find_gpu(spelling).name == name
    for alias in card.get("aliases", ()):
        assert find_gpu(alias).name == name
    is_one_size = re.search(r"\d GB|\dGB", name) is None or "GB" in devices[0]
    assert not is_one_size or {find_gpu(device).name for device in devices} == {name}
    assert find_gpu(name).device == devices[0]


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA T4", "T4"),
        ("H100-SXM", "H100"),
        ("NVIDIA H100 SXM5 80GB", "H100"),
        ("A100-40GB", "A100 40GB"),
        ("a100_80gb", "A100 80GB"),
        ("A100-SXM4-80GB", "A100 80GB"),
        ("V100-SXM2-32GB", "V100 32GB"),
        ("RTX4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("rtx4070ti", "RTX 4070 Ti"),
        ("RTX 4070 Ti Super", "RTX 4070 Ti SUPER"),
        ("4070tisuper", "RTX 4070 Ti SUPER"),
        ("RTX 4060 Ti 16 GB", "RTX 4060 Ti 16GB"),
        ("RTX 6000 Ada Gen", "RTX 6000 Ada"),
        ("A6000", "RTX A6000"),
        ("GH200", "GH200 96GB"),
        ("gh200-96GB", "GH200 96GB"),
        ("NVIDIA GH200", "GH200 96GB"),
        ("Instinct MI300X OAM", "MI300X"),
    ],
)
def test_a_gpu_is_found_by_other_spellings(name: str, gpu: str) -> None:
    assert find_gpu(name).name == gpu


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("A100", "Choose one of: A100 40GB, A100 80GB; or give the size: --gpu 24GiB"),
        ("V100", "Choose one of: V100 16GB, V100 32GB; or give the size: --gpu 24GiB"),
        (
            "NVIDIA GeForce RTX 4060 Ti",
            "Choose one of: RTX 4060 Ti 16GB, 8GiB; or give the size: --gpu 24GiB",
        ),
        ("rtx3060", "Choose one of: RTX 3060 12GB, 8GiB; or give the size: --gpu 24GiB"),
    ],
)
def test_a_name_of_several_sizes_is_a_question(name: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match="comes in several sizes") as refused:
        find_gpu(name)
    assert refused.value.remedy == remedy
    choices = remedy.removeprefix("Choose one of: ").partition(";")[0].split(", ")
    assert len({find_gpu(choice).usable_bytes for choice in choices}) == len(choices) > 1


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("RTX 6000", "Did you mean RTX 6000 Ada, RTX PRO 6000 or RTX PRO 6000 Max-Q? Or give"),
        ("RTX 4070 Supper", "Did you mean RTX 4070 SUPER"),
        ("MI250", "Did you mean MI250X? Or give"),
        ("h-100", "Did you mean H100? Or give"),
        ("L 40S", "Did you mean L40S? Or give"),
        ("rtx4909", "Did you mean RTX 4090? Or give"),
        ("RTX 5009", "Did you mean RTX 5090? Or give"),
        ("5090TI", "Known with this number: RTX 5090. Or give"),
        ("RTX 3080 Ti", "Known with this number: RTX 3080 10GB. Or give"),
        ("RTX 5090 Ti Laptop", "Give the size"),
        ("RTX 2080", "Give the size"),
        ("Quadro RTX 8000", "Give the size"),
        ("Foo 9000", "Give the size"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "Give the size: --gpu 24GiB"),
        ("NVIDIA GeForce RTX 5090 D", "Give the size"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "Give the size"),
        ("NVIDIA A40-48Q", ""),
        ("NVIDIA H20-3e", ""),
        ("A100 20GB", ""),
        ("NVIDIA H800 PCIe", "Give the size"),
        ("H2000", "Give the size"),
        ("L400", "Give the size"),
        ("", "Give the size"),
        ("rtx", ""),
        ("24", "Give the size: --gpu 24GiB"),  # and not T4 or L4
        ("0GiB", "Give the size"),
        ("9" * 400 + "GiB", "Give the size"),
    ],
)
def test_a_gpu_that_is_not_known_is_not_taken_for_another(name: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as refused:
        find_gpu(name)
    assert refused.value.message.endswith(": is not known")
    assert refused.value.remedy.startswith(remedy)
    assert refused.value.remedy.lower().endswith("give the size: --gpu 24gib")


@pytest.mark.parametrize("name", ["Jetson", "NVIDIA Jetson AGX Orin", "DGX Spark", "Apple M3"])
def test_a_gpu_that_shares_the_hosts_memory_is_described_by_its_free_memory(name: str) -> None:
    with pytest.raises(ConfigError, match="shares the host's memory") as refused:
        find_gpu(name)
    assert refused.value.remedy == "Give the free memory instead, for example --gpu 32GiB"


@pytest.mark.parametrize("size", ["24GiB", "24GB", "24 GB", "24g"])
def test_a_memory_stands_for_any_gpu_of_this_size(size: str) -> None:
    gpu = find_gpu(size)
    assert gpu.usable_bytes == 24 * GIB - 600 * MIB
    assert (gpu.compute_capability, gpu.device) == (None, None)


def test_peaks_hold_for_a_drivers_name_and_are_unknown_without_a_source() -> None:
    assert peak_tflops("NVIDIA H200", "fp32") == 67.0
    assert peak_tflops("NVIDIA H200", "fp16") == peak_tflops("NVIDIA H200", "bf16") == 989.0
    assert peak_tflops("NVIDIA GeForce RTX 4090", "bf16_pure") == 165.2
    assert peak_tflops("NVIDIA GeForce RTX 5090", "tf32") == 104.8
    assert peak_tflops("Tesla T4", "fp16") == 65.0
    assert peak_tflops("Tesla T4", "bf16") is None
    assert peak_tflops("NVIDIA H100 NVL", "fp32") is None
    assert peak_tflops("NVIDIA H200 NVL", "bf16") is None
    assert peak_tflops("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16") is None
    assert peak_tflops(None, "bf16") is None


@pytest.mark.parametrize(
    ("device", "capability"),
    [
        ("NVIDIA GeForce RTX 4060 Ti", 8.9),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("AMD Instinct MI300X", None),
    ],
)
def test_a_gpu_that_is_here_has_the_memory_of_its_driver(
    device: str, capability: float | None
) -> None:
    model = gpu_from_driver(device, 8 * GIB)
    assert (model.name, model.usable_bytes) == (device, 8 * GIB - 600 * MIB)
    assert model.compute_capability == capability
    assert model.is_amd == device.startswith("AMD")


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
        ("NVIDIA GeForce RTX 4070 Ti", "RTX 4070", False),
        ("NVIDIA GeForce RTX 4070 Ti", "RTX 4070 Ti", True),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090", False),
        ("NVIDIA GeForce RTX 2080 Ti", "2080 ti", True),
        ("", "H100", False),
        ("NVIDIA H200", None, True),
    ],
)
def test_a_gpu_of_a_cell_is_matched_by_the_same_words(
    device: str, kind: str | None, matches: bool
) -> None:
    assert matches_kind(device, kind) is matches
