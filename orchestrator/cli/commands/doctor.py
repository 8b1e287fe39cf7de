"""`sweep doctor` and `sweep schema`: this machine, and the format of a config."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from orchestrator.cli.commands.option_types import RunLocationType
from orchestrator.common.errors import EXIT_FAILURES
from orchestrator.common.output import ProgressLine
from orchestrator.common.run_location import RunLocation


@click.command()
@click.option(
    "--out",
    type=RunLocationType(),
    default=Path("results"),
    help="Folder or bucket to check for writing.  [results]",
)
def doctor(out: RunLocation) -> None:
    """Check what this machine can measure, and show how to fix what is missing.

    Example: sweep doctor
    """
    from orchestrator.sweep.doctor import examine

    has_faults = False
    findings = examine(out)
    while True:
        with ProgressLine("checking"):  # starting Ray takes up to 10 s
            finding = next(findings, None)
        if finding is None:
            break
        click.echo(str(finding))
        # `good` is None for a fact that is neither good nor bad.
        has_faults |= finding.good is False
    if has_faults:
        sys.exit(EXIT_FAILURES)


@click.command()
@click.option("--policy", is_flag=True, help="Print that of a policy for `sweep compare --gate`.")
def schema(policy: bool) -> None:
    """Print the JSON Schema of a config, for editors.

    Example: sweep schema > sweep.schema.json
    """
    import json

    from orchestrator.analysis.gate_policy import PolicyFile
    from orchestrator.config.schema import json_schema

    made = PolicyFile.model_json_schema() if policy else json_schema()
    click.echo(json.dumps(made, indent=1))
