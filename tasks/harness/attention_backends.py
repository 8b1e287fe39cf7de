"""Chooses an implementation of attention for a cell, or says why this device cannot do it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable

import torch

from model.attention import IMPLEMENTATIONS, Attention, make_attention
from tasks.harness.compilation import load_compiler
from tasks.harness.device import Skip, backend_refused
from tasks.harness.precision import autocast, stored_dtype
from tasks.spec.parameters import AttentionAxisParams

_PLAIN = ("naive", "torch_softmax", "weights_only", "recompute")
_PROBE_LENGTH = 128


def choose_attention(
    params: AttentionAxisParams,
    length: int,
    causal: bool,
    d_head: int,
    device: torch.device,
    gradients: bool,
) -> Attention:
    """Raises Skip, with torch's own reasons where it gives them."""
    if params.attention == "flex" and device.type == "cpu" and gradients:
        raise Skip("attention: flex has no backward pass on the CPU")
    if params.attention in IMPLEMENTATIONS and params.attention not in _PLAIN:
        _probe(params, causal, d_head, device, gradients)
    if params.attention == "flex":
        load_compiler()
    return make_attention(params.attention, length, causal, device)


def _probe(
    params: AttentionAxisParams, causal: bool, d_head: int, device: torch.device, gradients: bool
) -> None:
    """Tries a short sequence: what torch supports depends on its version, the dtype, the width and the hardware."""
    shape = (3, 1, 1, _PROBE_LENGTH, d_head)
    inputs = torch.zeros(shape, dtype=stored_dtype(params), device=device, requires_grad=gradients)
    attend = make_attention(params.attention, _PROBE_LENGTH, causal, device)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with autocast(params)():
                result = attend(*inputs)
            if gradients:
                result.sum().backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if not backend_refused(error):
                raise
            raise Skip(
                f"attention: {params.attention} cannot do this here: {_reasons(said) or error}"
            ) from error


def _reasons(said: Iterable[warnings.WarningMessage]) -> str:
    """What torch says of the backend that was asked for; of the others it says that they are switched off."""
    texts = [str(warning.message).split(" (Triggered")[0].strip() for warning in said]
    return " ".join(
        text for text in texts if not re.search("not used because:$|runtime disabled", text)
    )
