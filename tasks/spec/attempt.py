"""An attempt at a cell: the input of the measuring process as JSON, and its files."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from tasks.spec.axes import Values
from tasks.spec.cell import Cell
from tasks.spec.parameters import Params
from tasks.spec.registry import make_cell

ATTEMPT_FILE = "attempt.json"
JOURNAL_FILE = "journal.jsonl"
LOG_FILE = "log.txt"
RERUN_FILE = "rerun.sh"
PHASE_FILE = "phase"
FLIGHT_FILE = "flight.json"
BEFORE_ITS_TASK = ("", "start")  # stages before the process begins its task
# Limit for these stages. A cell's own time limit starts after them, because importing torch on a
# busy host may take minutes.
PREPARATION_S = 300.0
_CHECKSUM = "checksum"  # CRC32 of the other values
# File systems allow 255 bytes in a name; the kind and the suffix of an artifact need some of them.
_LONGEST_NAME = 120
# The measuring process is forked by a process that has imported torch, or is a new process.
StartMethod = Literal["fork", "spawn"]


@dataclass(frozen=True)
class Settings:
    """Settings of the measuring process. They are not part of a cell's identity.

    timeout_s: limit from the begin of the task. env: variables for the measuring process.
    host_memory_gib: limit on the resident set. import_paths: appended to `sys.path`.
    start_method: None: forked if possible. cores: the process is restricted to these; None: all.
    collective_timeout_s: for ranks to arrive at a collective, from the end of the warm-up on.
    beaten_ms: adaptive timing ends early if every synced step is slower; None: never.
    """

    timeout_s: float = 600.0
    instruments: tuple[str, ...] = ("timing", "memory", "telemetry")
    env: Mapping[str, str] = field(default_factory=dict)
    host_memory_gib: float | None = None
    import_paths: tuple[str, ...] = ()
    start_method: StartMethod | None = None
    cores: tuple[int, ...] | None = None
    collective_timeout_s: float = 60.0
    beaten_ms: float | None = None

    @classmethod
    def from_json(cls, stored: Values) -> Settings:
        """Read stored settings, without the keys that only another version knows.

        Raise ValueError for a value of another type.
        """
        return msgspec.convert(stored, cls)


@dataclass(frozen=True)
class Attempt:
    """One try at a cell. `folder` holds all its files."""

    cell: Cell
    number: int
    folder: str
    settings: Settings

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
        }
        return json.dumps({**body, _CHECKSUM: _checksum(body)}, indent=1)


def read_attempt(text: str) -> Attempt:
    """Return the attempt that `Attempt.to_json` wrote.

    Raise ValueError if it was damaged since or is of somebody else, and what `make_cell` raises.
    """
    try:
        body = json.loads(text)
    except RecursionError as error:
        raise ValueError("the attempt is nested too deeply") from error
    if not isinstance(body, dict) or not isinstance(body.get("settings"), dict):
        raise ValueError("the attempt is no JSON object, or has no settings")
    stored = body.pop(_CHECKSUM, None)  # older versions wrote none
    if stored not in (None, _checksum(body)):
        raise ValueError("the attempt differs from what was written")
    cell = make_cell(body["task"], body["params"])
    settings = Settings.from_json(body["settings"])
    return Attempt(cell, body["number"], body["folder"], settings)


def _checksum(body: Mapping[str, object]) -> int:
    return zlib.crc32(json.dumps(body).encode())


def rank_file(path: Path, rank: int) -> Path:
    """Return the file of a rank: `log_1.txt` of rank 1, where rank 0 has `log.txt`."""
    return path.with_stem(f"{path.stem}_{rank}") if rank else path


def artifact_name(kind: str, params: Params, suffix: str) -> str:
    """Return a name with the non-default parameters: `trace_size-small_pass-forward.json.gz`."""
    given = "_".join(f"{name}-{value}" for name, value in params.non_default.items())
    return f"{kind}_{re.sub(r'[^A-Za-z0-9._-]+', '-', given)[:_LONGEST_NAME]}.{suffix}"
