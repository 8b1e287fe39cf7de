"""`sweep`; and `python -m orchestrator`, where the script is not on the PATH."""

from __future__ import annotations

import sys

from orchestrator.cli.bytecode_cache import keep_bytecode
from orchestrator.common.errors import EXIT_INTERRUPTED


def main() -> None:
    try:
        keep_bytecode()
        from orchestrator.cli.main import main as sweep
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    sweep(prog_name="sweep")


if __name__ == "__main__":
    main()
