"""A command that was ended early and is given again goes on: `--retry` and `--fresh` do not begin with the first cell anew.

Each invocation stands in the manifest, `finished` once it came to its end. What the unfinished ones of the same command have
brought to an end is not asked for again, whatever ran in between; a command that had come to its end is another one when it is
given once more, and so is one that would measure otherwise by now.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import takewhile
from typing import Any

from orchestrator.plan import RETRIED, Done, Past, history_of
from orchestrator.store import Run, RunWriter

FINISHED = "finished"
_NEVER = datetime.max.replace(tzinfo=UTC)


def done_already(run: Run, same: Mapping[str, Any], attempts: int) -> dict[str, Done]:
    """The cells that a command has measured again already, if it has not come to its end since.

    same: what its invocations have in common. attempts: how often a cell that fails is tried.
    """
    spans = list(_unfinished(run.read_manifest().get("invocations", []), same))
    if not spans:
        return {}
    rows = list(run.rows("attempts", ["cell", "attempt", "status", "wall_s", "replaces", "started_at"]))
    since = history_of((row[:-1] for row in rows if any(begin <= row[-1] < end for begin, end in spans)), run)
    before = history_of((row[:-1] for row in rows if row[-1] < spans[0][0]), run)
    found = {}
    for cell, past in since.items():
        failed = RETRIED.issuperset(past.statuses)
        if not failed or past.failures >= attempts:
            earlier = before.get(cell, Past())
            found[cell] = Done(max(1, earlier.successes), earlier.misses, failed)
    return found


def _unfinished(invocations: Sequence[Mapping[str, Any]], same: Mapping[str, Any]) -> Iterator[tuple[datetime, datetime]]:
    """From when to when each of the last ones ran that have not come to their end. Older programs did not write that down."""
    begins = [*(datetime.fromisoformat(one["time"]) for one in invocations), _NEVER]
    own = [place for place, one in enumerate(invocations) if all(one.get(name) == value for name, value in same.items())]
    last = list(takewhile(lambda place: invocations[place].get(FINISHED) is False, reversed(own)))
    return ((begins[place], begins[place + 1]) for place in reversed(last))


def note_finished(writer: RunWriter, words: Sequence[str]) -> None:
    manifest = writer.read_manifest()
    noted = [{**one, FINISHED: True} if one["command"] == list(words) else one for one in manifest.get("invocations", [])]
    if noted != manifest.get("invocations", []):
        writer.write_manifest({**manifest, "invocations": noted})
