"""run.json as it is read: whatever else it holds, what this program reads of it is of the types that it writes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, InstanceOf, ValidationError

from orchestrator.common.errors import RunError, RunMismatch

MANIFEST_FILE = "run.json"
RESTORED_BY = "`sweep run` with the same config writes it again"
_REMEDY = f"Restore it, or move it away: {RESTORED_BY}"
_OF_A_SWEEP = ("name", "config", "config_path", "selection", "invocations")
_Text = InstanceOf[str]  # any: of words of a command line that are no UTF-8, too


class _Read(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Choice(_Read):
    infer_oom: bool = False
    verify: int = 0
    repeat: int = 1
    retry: list[_Text] = []
    only: list[_Text] = []
    fresh: bool = False


class _Asked(_Read):
    choice: _Choice


class _Invocation(_Read):
    time: _Text
    command: list[_Text]
    asks_for: _Asked = _Asked(choice=_Choice())
    asked: dict[str, Any] = {}
    commit: _Text | None = None


class _Selection(_Read):
    set: dict[_Text, list[Any]]
    where: dict[_Text, list[Any]]
    sample: float | None = None
    instruments: list[_Text] = []


class _Manifest(_Read):
    schema_version: int = 0
    name: _Text = ""
    config: dict[_Text, Any] = {}
    config_path: _Text = ""
    selection: _Selection = _Selection(set={}, where={})
    asked: int = 0
    fingerprints: dict[_Text, list[dict[_Text, Any]]] = {}
    defaults: dict[_Text, dict[_Text, Any]] = {}
    invocations: list[_Invocation] = []


def read_manifest(file: Path, called: str, newest: int) -> dict[str, Any]:
    """called: as errors name the file. newest: the schema that this program knows.

    Raises RunError for what is none, RunMismatch for that of a newer program.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(
            f"{called}: cannot be read: {os.strerror(error.errno or 0)}", _REMEDY
        ) from error
    except (ValueError, RecursionError) as error:
        raise RunError(f"{called}: is not JSON: {error}", _REMEDY) from error
    if not isinstance(found, dict):
        raise RunError(
            f"{called}: is damaged, or of another program: it is no JSON object", _REMEDY
        )
    version = found.get("schema_version")
    if isinstance(version, int | float) and version > newest:
        raise RunMismatch(
            f"{called}: was written with schema {version}, newer than {newest}", "Update"
        )
    try:
        _Manifest.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise RunError(
            f"{called}: is damaged, or of another program: {place}: {first['msg']}", _REMEDY
        ) from error
    return found


def build_manifest(
    before: Mapping[str, Any],
    sweep: Mapping[str, Any],
    defaults: Mapping[str, Mapping[str, Any]],
    invocation: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the manifest of a run that one more command writes to.

    before: the manifest as it is, empty for a new run. sweep: the keys that describe the sweep;
    they replace the earlier ones. defaults: the default of each axis, by task. A report hides the
    axes at their default, and a later version of a task may have other defaults.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {
        "name": sweep["name"],
        "program": _program_version(),
        "commit": invocation["commit"],
        "created": before.get("created", now),
        "updated": now,
        **sweep,
        "defaults": {**before.get("defaults", {}), **defaults},
        "invocations": [*before.get("invocations", []), invocation],
    }


def _program_version() -> str:
    try:
        return version("transformer-sweep")
    except PackageNotFoundError:
        return "source"


def require_sweep(manifest: Mapping[str, Any], run: object) -> None:
    """Raises RunError where no sweep wrote it."""
    if "config" not in manifest:
        raise RunError(f"{run}: holds imported traces alone", f"See `sweep report {run}`")
    if missing := [name for name in _OF_A_SWEEP if name not in manifest]:
        raise RunError(
            f"{run}/{MANIFEST_FILE}: is damaged, or of another program: it has no {missing[0]}",
            _REMEDY,
        )
