"""Cells of equal runs are derived once."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _derive_once(derive_once: None) -> None:
    pass
