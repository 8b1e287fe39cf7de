from __future__ import annotations

import re

from orchestrator.common import errors
from orchestrator.common.errors import SweepError


def test_the_docstring_draws_every_error_below_its_base() -> None:
    def tree(kind: type[SweepError]) -> list[str]:
        own = [child for child in kind.__subclasses__() if child.__module__ == errors.__name__]
        return [kind.__name__, *(name for child in own for name in tree(child))]

    drawing = (errors.__doc__ or "").split("\n\n")[1]
    assert re.findall(r"^[│├└─ ]*(\w+)", drawing, re.MULTILINE) == tree(SweepError)
