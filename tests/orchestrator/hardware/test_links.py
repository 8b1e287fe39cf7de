"""Links between GPUs as a simulated NVML reports them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from orchestrator.execution import measurement
from orchestrator.execution.measurement import Slot, measure
from orchestrator.hardware.gpu_catalog import link_peak_gb_s
from orchestrator.hardware.host import GpuInfo, HostInfo
from orchestrator.hardware.links import describe_links
from orchestrator.sweep.doctor import _links
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status

SWITCH, HIDDEN = -1, -2  # at the other end of a link


@dataclass
class Driver:
    """NVML of some GPUs.

    ends: for each GPU what is at the other end of each of its links, None if it is not active.
    version: NVML's number of the NVLink version. direct: pairs that reach each other by NVLink.
    """

    ends: Mapping[str, Sequence[int | None]] = field(default_factory=dict)
    version: int = 6
    direct: Sequence[str] = ()
    peer_access: bool = True
    name: str = "NVIDIA A100-SXM4-80GB"
    generations: Mapping[str, int] = field(default_factory=dict)
    widths: Mapping[str, int] = field(default_factory=dict)

    def status(self, gpu: str, peer: str, index: int) -> int:
        assert isinstance(index, int)
        if index == pynvml.NVML_P2P_CAPS_INDEX_NVLINK:
            is_good = gpu + peer in self.direct
        else:
            is_good = self.peer_access
        return 0 if is_good else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED

    def end(self, gpu: str, link: int) -> int | None:
        ends = self.ends.get(gpu, ())
        if link >= len(ends):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return ends[link]

    def end_type(self, gpu: str, link: int) -> int:
        end = self.end(gpu, link)
        if end == HIDDEN:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if end == SWITCH:
            return int(pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH)
        return int(pynvml.NVML_NVLINK_DEVICE_TYPE_GPU)

    def answers(self) -> dict[str, Callable[..., Any]]:
        return {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetName": lambda gpu: self.name,
            "nvmlDeviceGetHandleByUUID": lambda uuid: uuid.removeprefix("GPU-"),
            "nvmlDeviceGetP2PStatus": self.status,
            "nvmlDeviceGetNvLinkState": lambda gpu, link: int(self.end(gpu, link) is not None),
            "nvmlDeviceGetNvLinkVersion": lambda gpu, link: self.version,
            "nvmlDeviceGetNvLinkRemoteDeviceType": self.end_type,
            "nvmlDeviceGetNvLinkRemotePciInfo": lambda gpu, link: SimpleNamespace(
                busId=str(self.end(gpu, link))
            ),
            "nvmlDeviceGetPciInfo": lambda gpu: SimpleNamespace(busId=str("abcd".index(gpu))),
            "nvmlDeviceGetMaxPcieLinkGeneration": lambda gpu: self.generations.get(gpu, 4),
            "nvmlDeviceGetCurrPcieLinkWidth": lambda gpu: self.widths.get(gpu, 16),
        }

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, answer in self.answers().items():
            monkeypatch.setattr(pynvml, name, answer)


ALL = [first + second for first in "abcd" for second in "abcd"]
H100 = Driver(dict.fromkeys("abcd", [SWITCH] * 18), direct=ALL)
MESH = Driver({gpu: [0, 1, 2, 3] * 4 for gpu in "abcd"}, 5, ALL)
BRIDGES = Driver(
    {"a": [1] * 4, "b": [0] * 4, "c": [3, 3, 3, None], "d": [2] * 3}, 5, direct=["ab", "cd"]
)


@pytest.mark.parametrize(
    ("driver", "gpus", "text", "peak"),
    [
        (H100, "ab", "NVLink 4 × 18", 450),
        (H100, "abcd", "NVLink 4 × 18", 450),
        (Driver({"a": [HIDDEN] * 18}, direct=ALL), "ab", "NVLink 4 × 18", 450),
        (Driver({"a": [SWITCH] * 12}, 5, ALL), "ab", "NVLink 3 × 12", 300),
        (Driver({"a": [1] * 4}, 5, ALL, name="NVIDIA GeForce RTX 3090"), "ab", "NVLink 3 × 4, graphics card", 56.25),
        # Four A100s without a switch: a ring uses more links than those of a pair.
        (MESH, "abcd", "NVLink 3 × 4, direct", None),
        (MESH, "ab", "NVLink 3 × 4", 100),
        (Driver({"a": [SWITCH] * 18}, 7, ALL), "ab", "NVLink 5 × 18", 900),
        # A link to a third GPU carries nothing of this pair.
        (Driver({"a": [1, 2, 2, None]}, 2, ALL), "ab", "NVLink 2 × 1", 25),
        (Driver(direct=ALL), "ab", "NVLink, number of links unknown", None),
        (Driver({"a": [SWITCH]}, 8, ALL), "ab", "NVLink 6 × 1", None),
        (Driver({"a": [SWITCH]}, 99, ALL), "ab", "NVLink ? × 1", None),
        (Driver(), "ab", "PCIe 4.0 × 16", 31.5),
        (
            Driver(peer_access=False, generations=dict.fromkeys("ab", 5)),
            "ab",
            "PCIe 5.0 × 16, no peer access",
            63,
        ),
        (Driver(generations={"a": 5}, widths={"b": 8}), "ab", "PCIe 4.0 × 8", 15.75),
        (
            BRIDGES,
            "abcd",
            "NVLink 3 × 4 (0–1); PCIe 4.0 × 16 (0–2 0–3 1–2 1–3); NVLink 3 × 3 (2–3)",
            31.5,
        ),
    ],
)  # fmt: skip
def test_links_have_words_and_a_peak(
    driver: Driver, gpus: str, text: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.install(monkeypatch)
    found = describe_links(list(gpus))
    assert found == text
    assert link_peak_gb_s(found) == (pytest.approx(peak, rel=1e-3) if peak else None)


@pytest.mark.parametrize("name", H100.answers())
@pytest.mark.parametrize(
    "error", [pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN), AttributeError("no such function")]
)
@pytest.mark.parametrize("driver", [H100, BRIDGES])
def test_no_fault_of_nvml_costs_a_cell(
    driver: Driver, name: str, error: Exception, monkeypatch: pytest.MonkeyPatch,
    make_attempt: Callable[..., Attempt],
) -> None:  # fmt: skip
    def refuse(*asked: object) -> object:
        raise error

    driver.install(monkeypatch)
    text = describe_links(list("abcd"))
    monkeypatch.setattr(pynvml, name, refuse)
    attempt = make_attempt(device="cuda", gpus=4, parallel="ddp", batch="per_gpu")
    ok = Outcome(attempt, Status.OK, "", "", {}, {"gpu": "x"}, (), 0.0, 0.0)
    monkeypatch.setattr(measurement, "execute", lambda attempt: ok)
    monkeypatch.setattr(measurement, "GpuHealthWatch", lambda uuid: None)
    names = dict(zip("0123", "abcd", strict=True))
    outcome = measure(attempt, Slot(4, gpu="0,1,2,3", uuids=names))
    assert isinstance(outcome, Outcome)
    assert outcome.status == Status.OK
    link = str(outcome.facts["link"])
    assert link == text or str(error) in link or "number of links unknown" in link


def test_doctor_shows_how_gpus_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostInfo(gpus=tuple(GpuInfo("x", 1, name) for name in "abcd"))
    lines = []
    for driver in (H100, BRIDGES, Driver(direct=ALL)):
        driver.install(monkeypatch)
        lines.append(str(_links(host)))
    assert lines == [
        "ok   links    NVLink 4 × 18: 450 GB/s each way for each pair",
        "ok   links    NVLink 3 × 4 (0–1); PCIe 4.0 × 16 (0–2 0–3 1–2 1–3); NVLink 3 × 3 (2–3): "
        "31.51 GB/s each way for the slowest pair",
        "note links    NVLink, number of links unknown. The column of_link will be null",
    ]
