"""The charts of a report, drawn with Vega-Lite as SVG and PNG."""

from __future__ import annotations

from importlib.util import find_spec

from orchestrator.common.errors import PlatformError


def require_packages() -> None:
    """Raise PlatformError if the package is missing that draws charts. Tables do not need it."""
    if find_spec("vl_convert") is None:
        raise PlatformError(
            "charts need vl-convert-python, not installed here",
            "Run `pip install vl-convert-python`, or print a table alone:"
            " sweep report RUN --table NAME",
        )
