"""The charts of a report, drawn with Vega-Lite as SVG and PNG."""

from __future__ import annotations

from importlib.util import find_spec

from orchestrator.common.errors import PlatformError

_PACKAGES = {"vl_convert": "vl-convert-python"}


def require_packages() -> None:
    """Raise PlatformError if a package is missing that draws charts. Tables do not need them."""
    missing = [package for module, package in _PACKAGES.items() if find_spec(module) is None]
    if missing:
        names = " ".join(missing)
        raise PlatformError(
            f"charts need {names}, not installed here",
            f"Run `pip install {names}`, or print a table alone: sweep report RUN --table NAME",
        )
