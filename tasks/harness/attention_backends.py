"""Choose the attention of a cell, or skip the cell if the device cannot run it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from model.attention import IMPLEMENTATIONS, Attention, make_attention
from tasks.harness.compilation import load_compiler
from tasks.harness.device import Skip
from tasks.harness.error_kinds import is_unsupported
from tasks.harness.precision import autocast, matmul_dtype, stored_dtype
from tasks.spec.parameters import AttentionAxisParams

# Implementations made of plain operations, which run everywhere.
_PLAIN = ("naive", "torch_softmax", "weights_only", "recompute")
# A backend refuses by dtype, width of a head and hardware, hardly by length, and a short sequence
# takes neither time nor memory.
_PROBE_LENGTH = 128


@dataclass(frozen=True)
class AttentionShape:
    """Length of the sequences, mask, width of a head, and the need for a backward pass."""

    length: int
    causal: bool
    d_head: int
    has_gradients: bool


def choose_attention(
    params: AttentionAxisParams, shape: AttentionShape, device: torch.device
) -> Attention:
    """Return the cell's attention. Raise Skip with torch's reasons if the device cannot run it."""
    if params.attention == "flex" and device.type == "cpu" and shape.has_gradients:
        raise Skip("attention: flex has no backward pass on the CPU")
    if params.attention in IMPLEMENTATIONS and params.attention not in _PLAIN:
        _probe(params, replace(shape, length=_PROBE_LENGTH), device)
    if params.attention == "flex":
        load_compiler()
    return make_attention(params.attention, shape.length, shape.causal, device)


def _probe(params: AttentionAxisParams, shape: AttentionShape, device: torch.device) -> None:
    # Trying is the only reliable test: torch's own rules differ between its versions.
    sizes = (3, 1, 1, shape.length, shape.d_head)
    dtype = stored_dtype(params) if params.autocasts else matmul_dtype(params)
    inputs = torch.zeros(sizes, dtype=dtype, device=device)
    inputs.requires_grad_(shape.has_gradients)
    attend = make_attention(params.attention, shape.length, shape.causal, device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with autocast(params)():
                result = attend(*inputs)
            if shape.has_gradients:
                result.sum().backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if not is_unsupported(error):
                raise
            reasons = _reasons(caught) or error
            raise Skip(
                f"attention: {params.attention} has no kernel in torch for {params.precision} and "
                f"this shape on this device: {reasons}"
            ) from error


def _reasons(caught: Iterable[warnings.WarningMessage]) -> str:
    """Return torch's reasons why the requested backend does not work."""
    # torch also warns, for each of the other backends, that it is disabled.
    disabled = re.compile("not used because:$|runtime disabled")
    reasons = []
    for warning in caught:
        text = str(warning.message).split(" (Triggered")[0].strip()
        if not disabled.search(text):
            reasons.append(text)
    return " ".join(reasons)
