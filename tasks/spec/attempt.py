"""One attempt at a cell: what the measuring process is given, as JSON, and the files that it leaves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from tasks.spec.cell import Cell
from tasks.spec.registry import make_cell

ATTEMPT_FILE = "attempt.json"
JOURNAL_FILE = "journal.jsonl"
LOG_FILE = "log.txt"
PHASE_FILE = "phase"
BEFORE_ITS_TASK = ("", "start")  # stages of an attempt: its process is on its way there
PREPARATION_S = 300.0  # for it to come there, which is not of a cell's own time


# How the measuring process starts: forked by a process that has imported torch, or as a new process.
StartMethod = Literal["fork", "spawn"]


@dataclass(frozen=True)
class Settings:
    """How to measure, as against what. Not part of a cell's identity.

    cores: those that its process keeps to; None: all.
    """

    timeout_s: float = 600.0
    instruments: tuple[str, ...] = ("timing", "memory", "telemetry")
    env: Mapping[str, str] = field(default_factory=dict)
    host_memory_gib: float | None = None
    import_paths: tuple[str, ...] = ()
    start_method: StartMethod | None = None  # None: forked where that works
    cores: tuple[int, ...] | None = None

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Settings:
        """Read stored settings, without the keys that only another version knows."""
        read: dict[str, Any] = {}
        for name in sorted({known.name for known in fields(cls)} & stored.keys()):
            value = stored[name]
            read[name] = tuple(value) if isinstance(value, list) else value
        return cls(**read)


@dataclass(frozen=True)
class Attempt:
    """One try at a cell. `folder` holds everything it leaves behind.

    replaces: the number of the attempt up to which the cell's successes count no more once this is one; 0 for none.
    """

    cell: Cell
    number: int
    folder: str
    settings: Settings
    replaces: int = 0

    @property
    def path(self) -> Path:
        return Path(self.folder)

    def to_json(self) -> str:
        body = {
            "cell": self.cell.id,
            "task": self.cell.task,
            "params": self.cell.params.values(),
            "number": self.number,
            "folder": self.folder,
            "settings": asdict(self.settings),
            "replaces": self.replaces,
        }
        return json.dumps(body, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Attempt:
        body = json.loads(text)
        cell, replaces = make_cell(body["task"], body["params"]), body.get("replaces", 0)
        settings = Settings.from_json(body["settings"])
        return cls(cell, body["number"], body["folder"], settings, replaces)
