"""What instruments leave beside the journal is named so that a person finds it."""

from __future__ import annotations

import re

from tasks.spec.parameters import Params

_LONGEST = 120


def artifact_name(what: str, params: Params, suffix: str) -> str:
    """After what differs from the defaults: `trace_size-small_pass-forward.json.gz`."""
    said = "_".join(f"{name}-{value}" for name, value in params.non_default().items())
    return f"{what}_{re.sub(r'[^A-Za-z0-9._-]+', '-', said)[:_LONGEST]}.{suffix}"
