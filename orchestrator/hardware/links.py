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
# Of the GPUs with NVLink 3, a GeForce, an A40 and an RTX A6000 have slower links than these.
_FULL_SPEED = ("A100", "A800", "A30")


def describe_links(uuids: Sequence[str]) -> str:
    """Return how each pair of these GPUs is connected, such as `NVLink 4 × 18`, or why that is unknown.

    Pairs are named, by the places of their GPUs, if their links differ:
    `NVLink 3 × 4 (0–1 2–3); PCIe 4.0 × 16 (0–2 0–3 1–2 1–3)`. `direct`: each of more than two GPUs has
    such links to each other one, without a switch.
    """
    pairs, is_mesh = defaultdict(list), len(uuids) > 2
    try:
        gpus = list(map(handle_by_uuid, uuids))
        for first, second in combinations(range(len(gpus)), 2):
            link, is_direct = _link(gpus[first], gpus[second])
            is_mesh &= is_direct
            pairs[link].append(f"{first}–{second}")
    except Exception as error:  # whatever the driver does: a measured cell does not fail for this
        return f"unknown: {typed_error_text(error)}"
    note = ", direct" if is_mesh else ""
    if len(pairs) == 1:
        return next(iter(pairs)) + note
    return "; ".join(f"{link}{note} ({' '.join(own)})" for link, own in pairs.items())


def _link(gpu: object, peer: object) -> tuple[str, bool]:
    """Return the link of a pair, and True if it is an NVLink without a switch."""
    import pynvml

    by_nvlink = pynvml.nvmlDeviceGetP2PStatus(gpu, peer, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    if by_nvlink == pynvml.NVML_P2P_STATUS_OK:
        links = list(_nvlinks(gpu, peer))
        if not links:
            return "NVLink, number of links unknown", False
        generation, is_direct = min(links)
        name = str(pynvml.nvmlDeviceGetName(gpu))
        is_slow = generation == "3" and not any(one in name for one in _FULL_SPEED)
        note = ", graphics card" if is_slow else ""
        return f"NVLink {generation} × {len(links)}{note}", is_direct
    # An idle GPU reports a lower generation than it has under load, but not a lower width.
    generation = min(map(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, (gpu, peer)))
    width = min(map(pynvml.nvmlDeviceGetCurrPcieLinkWidth, (gpu, peer)))
    # Writes, because the index of reads is a tuple in nvidia-ml-py 13.
    access = pynvml.nvmlDeviceGetP2PStatus(gpu, peer, pynvml.NVML_P2P_CAPS_INDEX_WRITE)
    note = "" if access == pynvml.NVML_P2P_STATUS_OK else ", no peer access"
    return f"PCIe {generation}.0 × {width}{note}", False


def _nvlinks(gpu: object, peer: object) -> Iterator[tuple[str, bool]]:
    """Yield each active NVLink through which a GPU reaches this peer.

    Of each its generation, and True if its other end is the peer. A switch reaches all GPUs.
    """
    import pynvml

    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        with suppress(pynvml.NVMLError):  # the GPU has fewer links
            end = _gpu_at_end(gpu, link) if pynvml.nvmlDeviceGetNvLinkState(gpu, link) else ""
            if end is None or end == pynvml.nvmlDeviceGetPciInfo(peer).busId:
                generation = pynvml.nvmlDeviceGetNvLinkVersion(gpu, link)
                yield _GENERATIONS.get(generation, "?"), end is not None


def _gpu_at_end(gpu: object, link: int) -> object:
    """Return the bus id of the GPU at the other end of a link; None if it is a switch.

    A virtual machine may not see what is at the other end.
    """
    import pynvml

    with suppress(pynvml.NVMLError):
        end = pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(gpu, link)
        if end == pynvml.NVML_NVLINK_DEVICE_TYPE_GPU:
            return pynvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu, link).busId
    return None
