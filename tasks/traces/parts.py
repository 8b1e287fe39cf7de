"""Label the parts of a model for tables, from the names of modules and functions in a trace."""

from __future__ import annotations

import re

# Prefixes of the ranges that the instruments write into a trace.
PHASE_PREFIX, PART_PREFIX = "phase::", "mod::"

OPTIMIZER = "optimizer"
# Sums of the gradients of a tensor that several parts use, which belong to none of them.
GRADIENT_SUMS = "gradient sums"

_LABELS = {
    "q_proj": "q projection", "k_proj": "k projection", "v_proj": "v projection",
    "output_proj": "o projection", "attn": "attention", "rope": "rope",
    "w1": "ffn", "w2": "ffn", "w3": "ffn", "ffn": "ffn",
    "ln1": "norm", "ln2": "norm", "ln_final": "norm",
    "token_embeddings": "embedding", "lm_head": "head", "layers": "residual",
}  # fmt: skip


def known_label(attribute: str) -> str:
    """Return the label of a module from the last part of its name, or an empty text."""
    return _LABELS.get(attribute, "")


def label_of(name: str) -> str:
    """Return the label of a part: `layers.3.attn.q_proj` is `q projection`.

    A name without a label stays, with `*` for its numbers.
    """
    if name.startswith("Optimizer."):  # torch's own range around every optimizer
        return OPTIMIZER
    words = [word for word in name.split(".") if not word.isdigit()]
    # The numbers of blocks become `*`, so that all blocks share a label.
    return _LABELS.get(words[-1] if words else "") or re.sub(r"\b\d+\b", "*", name) or "model"
