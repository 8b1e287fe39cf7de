"""`sweep doctor` and `sweep schema`: this machine, and the format of a config."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from orchestrator.common.errors import (
    EXIT_FAILURES,
)
from orchestrator.store.remote_address import RunLocation, RunLocationType

if TYPE_CHECKING:
    pass


@click.command()
@click.option(
    "--out", type=RunLocationType(), default=Path("results"), help="Where results would go."
)
def doctor(out: RunLocation) -> None:
    """Say what this machine can do, what is missing, and what to do about it.

    Example: sweep doctor
    """
    from orchestrator.sweep.doctor import examine

    bad = False
    for finding in examine(out):
        click.echo(str(finding))
        bad |= finding.good is False
    sys.exit(EXIT_FAILURES if bad else 0)


@click.command()
def schema() -> None:
    """Print the JSON Schema of a config, for editors.

    Example: sweep schema > sweep.schema.json
    """
    import json

    from orchestrator.config.schema import json_schema

    click.echo(json.dumps(json_schema(), indent=1))
