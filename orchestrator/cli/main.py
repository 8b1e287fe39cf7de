"""The command line: the group `sweep` and its commands.

Each command imports what it needs inside its function, so that `sweep --help` prints within a
fraction of a second and only `sweep run` loads Ray.
"""

from __future__ import annotations

import click

from orchestrator.cli.commands.capacity import max_batch, max_context
from orchestrator.cli.commands.compare import compare
from orchestrator.cli.commands.environment import doctor, schema
from orchestrator.cli.commands.import_nsys import import_nsys
from orchestrator.cli.commands.plan import plan
from orchestrator.cli.commands.publish import publish
from orchestrator.cli.commands.report import report
from orchestrator.cli.commands.run import run
from orchestrator.cli.commands.status import show, status
from orchestrator.cli.group import SweepGroup


@click.group(cls=SweepGroup)
@click.version_option(package_name="transformer-sweep")
def main() -> None:
    """Sweep a grid of Transformer training configurations over your GPUs, one isolated cell at a
    time.
    """


COMMANDS = (
    plan, run, max_context, max_batch, status, show, report, compare, publish, import_nsys, doctor,
    schema,
)  # fmt: skip
for command in COMMANDS:
    main.add_command(command)
