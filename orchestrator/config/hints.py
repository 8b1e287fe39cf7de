"""Problems and remedies for words that a config may not contain.

Settings of other programs get a sentence about what stands for them here, and other words the
allowed word that was meant, or all allowed words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from orchestrator.common.suggestions import suggestion
from orchestrator.common.text import letters_of
from tasks.spec.messages import shorten

LONGEST_VALUE = 60  # letters of a value in a message

_OWN_MODEL = "Provide your own model: model: package.module:Class"
# Patterns of names in lower case and without separators, what they ask for, and the remedy.
_UNSUPPORTED_NAMES = (
    (r"dropout|pdrop", "dropout", _OWN_MODEL),
    (r"experts|moe$", "mixtures of experts", _OWN_MODEL),
    (
        r"^lr$|learningrate|weightdecay|momentum|betas",
        "settings of the optimizer",
        "Leave it out: the time and the memory of a step do not depend on it",
    ),
)
# By axis: a pattern of values, and the remedy.
_UNSUPPORTED_VALUES = {
    "precision": (r"8|4|e[45]m|double", "Write bf16 or fp16, or for more digits fp32"),
    "optimizer": (
        r"8bit|4bit|bitsandbytes|bnb|paged|torchao",
        "Name the class of a package: bitsandbytes.optim:AdamW8bit or torchao.optim:AdamW8bit",
    ),
}
# By axis and the remedy that it gets: what else is meant by similar words.
_ALSO_MEANT = {("optimizer", "Did you mean 'fused'?"): " fused, foreach and loop are torch's AdamW"}


def unknown_name(where: str, name: str, allowed: Iterable[str]) -> tuple[str, str]:
    """Return the problem and the remedy for a key that is not allowed where it stands."""
    return f"{where}: unknown name", suggestion(name, allowed)


def unknown_axis(where: str, task: str, name: str, allowed: Iterable[str]) -> tuple[str, str]:
    """Return the problem and the remedy for an axis that a task does not have."""
    for pattern, setting, remedy in _UNSUPPORTED_NAMES:
        if re.search(pattern, letters_of(name)):
            return f"{where}: {task} does not support {setting}", remedy
    return f"{where}: {task} has no axis {quoted(name)}", suggestion(name, allowed)


def unknown_value(where: str, axis: str, value: object, allowed: Iterable[str]) -> tuple[str, str]:
    """Return the problem and the remedy for a value that an axis cannot have."""
    remedy = suggestion(value, allowed)
    pattern, unsupported = _UNSUPPORTED_VALUES.get(axis, ("$^", ""))
    if not remedy.startswith("Did you mean") and re.search(pattern, letters_of(str(value))):
        return f"{where}: {quoted(value)} is not supported", unsupported
    also = _ALSO_MEANT.get((axis, remedy), "")
    return f"{where}: {quoted(value)} is not allowed", remedy + also


def quoted(value: object) -> str:
    """Return a value for a message, at most 60 letters of it."""
    return shorten(repr(value), LONGEST_VALUE)
