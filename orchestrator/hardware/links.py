"""Links between the GPUs of one host, as NVML reports them: NVLink, or else PCIe."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import combinations

from orchestrator.hardware.nvml import handle_by_uuid
from tasks.spec.messages import typed_error_text

# NVML counts versions: NVML_NVLINK_VERSION_4_0 is 6.
_GENERATIONS = {1: "1", 2: "2", 3: "2", 4: "3", 5: "3", 6: "4", 7: "5", 8: "6"}


def describe_links(uuids: Sequence[str]) -> str:
    """Return how each pair of these GPUs is connected, such as `NVLink 4 × 18`, or why that is unknown.

    Pairs are named, by the places of their GPUs, if their links differ:
    `NVLink 3 × 4 (0–1 2–3); PCIe 4.0 × 16 (0–2 0–3 1–2 1–3)`.
    """
    pairs = defaultdict(list)
    try:
        gpus = list(map(handle_by_uuid, uuids))
        for first, second in combinations(range(len(gpus)), 2):
            pairs[_link(gpus[first], gpus[second])].append(f"{first}–{second}")
    except Exception as error:  # whatever the driver does: a measured cell does not fail for this
        return f"unknown: {typed_error_text(error)}"
    if len(pairs) == 1:
        return next(iter(pairs))
    return "; ".join(f"{link} ({' '.join(own)})" for link, own in pairs.items())


def _link(gpu: object, peer: object) -> str:
    import pynvml

    by_nvlink = pynvml.nvmlDeviceGetP2PStatus(gpu, peer, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    if by_nvlink == pynvml.NVML_P2P_STATUS_OK:
        generations = list(_nvlink_generations(gpu, peer))
        if not generations:
            return "NVLink, number of links unknown"
        return f"NVLink {min(generations)} × {len(generations)}"
    # An idle GPU reports a lower generation than it has under load, but not a lower width.
    generation = min(map(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, (gpu, peer)))
    width = min(map(pynvml.nvmlDeviceGetCurrPcieLinkWidth, (gpu, peer)))
    # Writes, because the index of reads is a tuple in nvidia-ml-py 13.
    access = pynvml.nvmlDeviceGetP2PStatus(gpu, peer, pynvml.NVML_P2P_CAPS_INDEX_WRITE)
    note = "" if access == pynvml.NVML_P2P_STATUS_OK else ", no peer access"
    return f"PCIe {generation}.0 × {width}{note}"


def _nvlink_generations(gpu: object, peer: object) -> Iterator[str]:
    """Yield the generation of each active NVLink through which a GPU reaches this peer."""
    import pynvml

    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        with suppress(pynvml.NVMLError):  # the GPU has fewer links
            if pynvml.nvmlDeviceGetNvLinkState(gpu, link) and _leads_to(gpu, link, peer):
                yield _GENERATIONS.get(pynvml.nvmlDeviceGetNvLinkVersion(gpu, link), "?")


def _leads_to(gpu: object, link: int, peer: object) -> bool:
    """Return False if the other end of a link is another GPU.

    A switch reaches all GPUs. A virtual machine may not see what is at the other end.
    """
    import pynvml

    with suppress(pynvml.NVMLError):
        end = pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(gpu, link)
        if end == pynvml.NVML_NVLINK_DEVICE_TYPE_GPU:
            remote = pynvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu, link)
            return bool(remote.busId == pynvml.nvmlDeviceGetPciInfo(peer).busId)
    return True
