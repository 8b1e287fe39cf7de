"""The options of a command that select which cells it measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from tasks.spec.cell import Cell
from tasks.spec.status import Status

# Doubts about a success: words of --retry, and the columns of `cells` that show them.
FLAWS: Mapping[str, str] = {"cpu-contended": "cpu_contended", "interval-wide": "interval_wide"}
# Words of older versions, in commands and in stored manifests.
FORMER_FLAWS: Mapping[str, str] = {"disturbed": "cpu-contended", "wide": "interval-wide"}


@dataclass(frozen=True)
class ResumedCell:
    """A cell that a command which goes on has measured again already. times: how often it is to be in all, as it was before;
    misses: how often it had come to nothing until then; failed: whether it did nothing else since.
    """

    repetitions: int
    misses: int = 0
    failed: bool = False


@dataclass(frozen=True)
class RunOptions:
    """What the user asked of this run. `only` and `retry` hold statuses, `only` also `pending`, `retry` also flaws.

    infer_oom: whether an out-of-memory that was inferred will do. verify: how many of those are to be measured all the same.
    repeat: how often each cell is to be measured, in all: what its repetitions differ in is the noise of the machine. done: by
    its id each cell that was measured again already, as was asked.
    """

    infer_oom: bool = False
    verify: int = 0
    repeat: int = 1
    retry: frozenset[str] = frozenset()
    only: frozenset[str] = frozenset()
    fresh: bool = False
    done: Mapping[str, ResumedCell] = field(default_factory=dict)

    @property
    def again(self) -> bool:
        """Whether cells are asked for that were measured before."""
        return self.fresh or bool(self.retry | self.only)

    def to_json(self) -> dict[str, Any]:
        """What the user said."""
        said = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name != "done"
        }
        return {
            name: sorted(value) if isinstance(value, frozenset) else value
            for name, value in said.items()
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> RunOptions:
        """Read the stored options, without those that only another version knows."""
        read: dict[str, Any] = {}
        for name in sorted({known.name for known in fields(cls)} & stored.keys()):
            value = stored[name]
            read[name] = frozenset(value) if isinstance(value, list) else value
        if "retry" in read:  # older versions had further words, which have no effect now
            words = {FORMER_FLAWS.get(word, word) for word in read["retry"]}
            read["retry"] = frozenset(words & {*Status, "pending", *FLAWS})
        return cls(**read)

    def of(self, cell: Cell) -> RunOptions:
        """What is still asked of one that is done."""
        repeat = max(self.repeat, self.done[cell.id].repetitions)
        return replace(self, fresh=False, retry=frozenset(), only=frozenset(), repeat=repeat)
