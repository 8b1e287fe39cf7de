"""File names of what instruments store with the journal."""

from __future__ import annotations

import re

from tasks.spec.parameters import Params

# File systems allow 255 bytes in a name; the kind and the suffix need some of them.
_LONGEST = 120


def artifact_name(kind: str, params: Params, suffix: str) -> str:
    """Return a name with the non-default parameters: `trace_size-small_pass-forward.json.gz`."""
    given = "_".join(f"{name}-{value}" for name, value in params.non_default().items())
    return f"{kind}_{re.sub(r'[^A-Za-z0-9._-]+', '-', given)[:_LONGEST]}.{suffix}"
