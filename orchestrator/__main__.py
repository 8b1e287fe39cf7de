"""`python -m orchestrator` is `sweep`, where the script is not on the PATH."""

from orchestrator.cli import main

main(prog_name="sweep")
