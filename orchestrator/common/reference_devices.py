"""The devices of the published numbers. Imports no pandas, so that the command line can list
them quickly.
"""

from __future__ import annotations

from orchestrator.common.errors import ConfigError
from orchestrator.common.suggestions import suggestion

ALL = "all"  # selects every device
# The words that `sweep report --reference` accepts, with the name that the report prints.
DEVICES = {
    "a100": "A100 40 GB",
    "h100": "H100 80 GB",
    "h100-96gb": "H100 96 GB",
    "rtx5090": "RTX 5090",
    "rtx-pro-6000": "RTX PRO 6000 WK",
    "a800": "A800 80 GB",
    "b200": "B200",
    "macbook-air": "MacBook Air",
    "apple-m4": "Apple M4",
    "not-named": "GPU not named",
}


def find_device(word: str) -> str:
    """Return the word of a device, or ALL. Raise ConfigError for any other word."""
    if word in DEVICES or word == ALL:
        return word
    hint = f"Use {', '.join(DEVICES)} or {ALL}"
    close = suggestion(word, [*DEVICES, ALL])
    if close.startswith("Did"):
        hint = f"{close} {hint}"
    raise ConfigError(f"--reference {word}: no write-up has numbers for it", hint)
