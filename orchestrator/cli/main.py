"""The command line: the group `sweep` and the names of its commands.

`sweep --help` prints within a fraction of a second and only `sweep run` loads Ray: a command is
imported when it is used, and imports what it needs inside its function.
"""

from __future__ import annotations

import click

from orchestrator.cli.group import LazyCommands, SweepGroup

MODULES = {
    "compare": "compare", "doctor": "doctor", "import": "import_traces",
    "max-batch": "capacity", "max-context": "capacity", "plan": "plan", "publish": "publish",
    "report": "report", "run": "run", "schema": "doctor", "show": "status", "status": "status",
}  # fmt: skip


@click.group(cls=SweepGroup, commands=LazyCommands(MODULES))
@click.version_option(package_name="transformer-sweep")
def main() -> None:
    """Sweep a grid of Transformer training configurations over your GPUs, one isolated cell at a
    time.
    """
