"""The site of the docs builds without a warning and needs no network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.mark.docs
def test_the_site_builds_without_a_warning_and_loads_nothing_from_a_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "docs", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    pages = [page.read_text() for page in tmp_path.rglob("*.html")]
    assert len(pages) > 20
    loaded = re.compile(r'<(?:script|img|link)\b[^>]*?(?:src|href)="(https?:[^"]+)"')
    assert [address for page in pages for address in loaded.findall(page)] == []
    assert "max-context" in (tmp_path / "searchindex.js").read_text()
