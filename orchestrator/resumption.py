"""A command that was ended early and is given again goes on: `--retry` and `--fresh` do not begin with the first cell anew.

Each invocation stands in the manifest, `finished` once it came to its end. What a run of the same unfinished command has begun
since the first of them is not asked for again; a command that had come to its end is another one when it is given once more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import takewhile
from typing import Any

from orchestrator.store import Run, RunWriter

FINISHED = "finished"


def done_already(run: Run, words: Sequence[str]) -> frozenset[str]:
    """The cells that were begun since `words` were given first, if they have not come to their end since."""
    unfinished = list(takewhile(lambda one: _goes_on(one, words), reversed(run.read_manifest().get("invocations", []))))
    if not unfinished:
        return frozenset()
    since = datetime.fromisoformat(unfinished[-1]["time"])
    return frozenset(cell for cell, started in run.rows("attempts", ["cell", "started_at"]) if started >= since)


def _goes_on(invocation: Mapping[str, Any], words: Sequence[str]) -> bool:
    """Programs of before did not write down whether they came to their end."""
    return invocation["command"] == list(words) and invocation.get(FINISHED) is False


def note_finished(writer: RunWriter) -> None:
    manifest = writer.read_manifest()
    *earlier, last = manifest["invocations"]
    writer.write_manifest({**manifest, "invocations": [*earlier, {**last, FINISHED: True}]})
