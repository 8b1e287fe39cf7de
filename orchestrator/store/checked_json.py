"""Read a JSON file that somebody else may have written or damaged, and check it against a model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from orchestrator.common.errors import RunError, RunMismatch
from orchestrator.store.layout import SCHEMA_VERSION

DAMAGED = "is damaged, or of another program"


def read_checked_json(file: Path, name: str, model: type[BaseModel], remedy: str) -> dict[str, Any]:
    """Return the object in a file that has the types of a model.

    name: the file in messages. remedy: what to do if it is damaged. Raise RunError if it is,
    RunMismatch if a newer program wrote it.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise RunError(f"{name}: cannot be read: {reason}", remedy) from error
    except (ValueError, RecursionError) as error:
        raise RunError(f"{name}: is not JSON: {error}", remedy) from error
    if not isinstance(found, dict):
        raise RunError(f"{name}: {DAMAGED}: it is no JSON object", remedy)
    # Before anything else is checked: a newer schema may have other types.
    schema = found.get("schema_version")
    if isinstance(schema, int | float) and schema > SCHEMA_VERSION:
        raise RunMismatch(
            f"{name}: was written with schema {schema}, newer than {SCHEMA_VERSION}", "Update"
        )
    try:
        model.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise RunError(f"{name}: {DAMAGED}: {key}: {first['msg']}", remedy) from error
    return found
