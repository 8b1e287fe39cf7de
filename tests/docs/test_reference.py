"""The reference pages are what the code makes of itself."""

from __future__ import annotations

import runpy

import pytest

from tests.conftest import ROOT

PAGES = runpy.run_path(str(ROOT / "docs" / "make_reference.py"))["pages"]()


@pytest.mark.parametrize("name", PAGES)
def test_a_reference_page_is_up_to_date(name: str) -> None:
    """If this fails, run `python docs/make_reference.py`."""
    assert (ROOT / "docs" / "reference" / name).read_text() == PAGES[name]
