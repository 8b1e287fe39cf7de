"""Configuration of the site: `make docs` builds it into build/docs, with warnings as errors."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

project = "transformer-sweep"
# The site is searched in the browser, so it needs no network and no server.
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["make_reference.py"]
html_theme = "furo"
html_title = project
html_show_copyright = False
html_show_sphinx = False
nitpicky = True
# Types of other packages; their documentation is not on this site.
nitpick_ignore_regex = [("py:.*", r"(pd|pandas|pathlib|collections)\..*|Path|Run")]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
