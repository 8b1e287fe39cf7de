"""run.json, the manifest of a run, is checked when it is read.

Other modules read a manifest as a dict. Its keys that this program knows have the types that it
writes; unknown keys of another version stay, and are ignored.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict, InstanceOf

from orchestrator.common.errors import RunError
from orchestrator.common.text import shell_path
from orchestrator.store.untrusted_files import DAMAGED

Manifest: TypeAlias = dict[str, Any]

MANIFEST_FILE = "run.json"
BEST = "best"  # its key with the candidates of the last `sweep best`
RESTORED_BY = "`sweep run` with the same config writes it again"
RESTORE_MANIFEST = f"Restore it, or move it away: {RESTORED_BY}"
_REQUIRED_FOR_SWEEP = ("name", "config", "config_path", "selection", "invocations")
# pydantic's own str refuses lone surrogates, which stand for bytes that are not UTF-8: a command
# line may name a folder with such bytes.
_Text = InstanceOf[str]
_Object = dict[_Text, object]


class _Stored(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Config(_Stored):
    name: _Text
    grids: list[_Object]


class _Choice(_Stored):
    infer_oom: bool = False
    repeat: int = 1
    retry: list[_Text] = []
    only: list[_Text] = []
    fresh: bool = False


class _Asked(_Stored):  # of older versions
    choice: _Choice


class _BestGroup(_Stored):
    default: _Text
    candidates: dict[_Text, _Text]  # why each was not measured
    ended: _Text


class _Best(_Stored):
    over: list[_Text]
    groups: list[_BestGroup]


class _Invocation(_Stored):
    time: _Text
    command: list[_Text]
    choice: _Choice = _Choice()
    skips: bool = False
    asks_for: _Asked = _Asked(choice=_Choice())
    marks: dict[_Text, int] = {}
    asked: _Object = {}
    commit: _Text | None = None


class _Selection(_Stored):
    set: dict[_Text, list[object]]
    where: dict[_Text, list[object]]
    sample: float | None = None
    instruments: list[_Text] = []


class StoredManifest(_Stored):
    """The types of the keys that this program knows."""

    schema_version: int = 0
    name: _Text = ""
    created: _Text = ""
    updated: _Text = ""
    config: _Config = _Config(name="", grids=[])  # imported traces have none
    config_path: _Text = ""
    selection: _Selection = _Selection(set={}, where={})
    asked: int = 0
    fingerprints: dict[_Text, list[_Object]] = {}
    host_gpus: list[dict[_Text, int]] = []  # of hosts of the last command, by the names of GPUs
    defaults: dict[_Text, _Object] = {}
    invocations: list[_Invocation] = []
    best: _Best = _Best(over=[], groups=[])


def require_sweep(manifest: Manifest, run: object) -> None:
    """Raise RunError if no sweep wrote the manifest, or if it lacks a key of a sweep."""
    if "config" not in manifest:
        raise RunError(
            f"{run}: holds imported traces alone", f"See `sweep report {shell_path(run)}`"
        )
    for name in _REQUIRED_FOR_SWEEP:
        if name not in manifest:
            raise RunError(f"{run}/{MANIFEST_FILE}: {DAMAGED}: it has no {name}", RESTORE_MANIFEST)
