"""What the parts of a model are called in tables, from the names that its modules and functions have in a trace."""

from __future__ import annotations

import re

OPTIMIZER = "optimizer"
GRADIENT_SUMS = "gradient sums"  # of a tensor that several parts have used: of none of them

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
    """Of a module by the last of its names; empty for one that has none."""
    return _LABELS.get(attribute, "")


def label_of(name: str) -> str:
    """`layers.3.attn.q_proj` is `q projection`; what has no label keeps its name, its numbers as `*`: all blocks are one."""
    if name.startswith("Optimizer."):  # torch's own range around every optimizer
        return OPTIMIZER
    last = next((word for word in reversed(name.split(".")) if not word.isdigit()), "")
    return _LABELS.get(last) or re.sub(r"\b\d+\b", "*", name) or "model"
