"""Label the parts of a model for tables, from the names of modules and functions in a trace."""

from __future__ import annotations

import re

OPTIMIZER = "optimizer"
GRADIENT_SUMS = "gradient sums"  # gradients of a tensor that several parts use: in no part

_LABELS = {
    "q_proj": "q projection",
    "k_proj": "k projection",
    "v_proj": "v projection",
    "output_proj": "o projection",
    "w1": "ffn",
    "w2": "ffn",
    "w3": "ffn",
    "ffn": "ffn",
    "ln1": "norm",
    "ln2": "norm",
    "ln_final": "norm",
    "rope": "rope",
    "token_embeddings": "embedding",
    "lm_head": "head",
    "attn": "attention",
    "layers": "residual",
}


def known_label(attribute: str) -> str:
    """Return the label of a module from the last part of its name, or an empty text."""
    return _LABELS.get(attribute, "")


def label_of(name: str) -> str:
    """Return the label of a part: `layers.3.attn.q_proj` is `q projection`.

    A name without a label stays, with `*` for its numbers, so that all blocks share it.
    """
    if name.startswith("Optimizer."):  # torch's own range around every optimizer
        return OPTIMIZER
    last = next((word for word in reversed(name.split(".")) if not word.isdigit()), "")
    return _LABELS.get(last) or re.sub(r"\b\d+\b", "*", name) or "model"
