"""The options of a command that select which cells it measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from tasks.spec.cell import Cell

BESIDE = "beside"
# Of a success. Of a cell that needs its host: something else had the cores, or other cells ran there meanwhile. Of any: its steps
# differ so much that the interval of their median is wide.
FLAWS = ("disturbed", BESIDE, "wide")


@dataclass(frozen=True)
class Done:
    """A cell that a command which goes on has measured again already. times: how often it is to be in all, as it was before;
    misses: how often it had come to nothing until then; failed: whether it did nothing else since.
    """

    times: int
    misses: int = 0
    failed: bool = False


@dataclass(frozen=True)
class Choice:
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
    done: Mapping[str, Done] = field(default_factory=dict)

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
    def from_json(cls, said: Mapping[str, Any]) -> Choice:
        read: dict[str, Any] = {
            name: frozenset(value) if isinstance(value, list) else value
            for name, value in said.items()
        }
        return cls(**read)

    def of(self, cell: Cell) -> Choice:
        """What is still asked of one that is done."""
        repeat = max(self.repeat, self.done[cell.id].times)
        return replace(self, fresh=False, retry=frozenset(), only=frozenset(), repeat=repeat)
