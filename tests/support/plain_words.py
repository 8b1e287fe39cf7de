"""Words that the texts of this project avoid, in pages and in code."""

from __future__ import annotations

import re

# Words that make a sentence hard to read; each is fine in a rare case.
DIALECT = (
    "said", "told", "tells", "beside", "kept", "elsewhere", "meanwhile", "henceforth", "so many",
    "as many as", "what of", "of which", "is there", "goes on", "go on", "going on", "comes to",
    "came to", "of its own", "one's own", "of before", "at once", "in place of", "by turns",
    "no more", "any more", "whatever else", "what follows", "begins to", "is asked", "was asked",
    "anew", "whichever",
)  # fmt: skip
DIALECT_WORD = re.compile(rf"\b({'|'.join(map(re.escape, DIALECT))})\b")
