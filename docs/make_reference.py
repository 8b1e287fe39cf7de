"""Write the pages of docs/reference from the code: `python docs/make_reference.py`.

A test compares the pages with what this program makes of the code, so that they cannot be out of date.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import click
from pydantic_core import PydanticUndefined

from orchestrator.analysis.column_docs import cell_columns, parameter_columns
from orchestrator.cli.main import main as sweep
from orchestrator.config.schema import SweepConfig
from orchestrator.report.tables.registry import TABLES
from orchestrator.store.cell_state import PENDING
from orchestrator.store.run import INCOMPLETE
from tasks.instruments import instrument_names
from tasks.spec.facts import EVIDENCE, FACTS
from tasks.spec.metrics import METRICS, PREDICTED_METRICS
from tasks.spec.parameters import Params
from tasks.spec.registry import all_tasks
from tasks.spec.status import Status
from tasks.spec.tables import INSTRUMENTS, STATUSES, STORED_TABLES, StoredTable

FOLDER = Path(__file__).resolve().parent / "reference"
NOTE = "<!-- Made by `python docs/make_reference.py`: change the code, not this page. -->\n"


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    return {
        "cli.md": cli_page(),
        "config.md": config_page(),
        "tables.md": tables_page(),
        "statuses.md": statuses_page(),
        "../columns.md": columns_page(),
    }


def cli_page() -> str:
    lines = [NOTE, "# Command line", "", "The text of `sweep COMMAND --help`, for every command."]
    shown = {name: one for name, one in sweep.commands.items() if not one.hidden}
    for name, command in sorted(shown.items()):
        context = click.Context(command, info_name=f"sweep {name}", max_content_width=80)
        lines += ["", f"## sweep {name}", "", "```text", command.get_help(context), "```"]
    return "\n".join(lines) + "\n"


def config_page() -> str:
    lines = [
        NOTE,
        "# Configs and axes",
        "",
        "A config names a task and the values of its axes. Every combination is a cell. The JSON",
        "Schema of a config, for your editor:",
        "",
        "```sh",
        "sweep schema > sweep.schema.json",
        "```",
        "",
        EXAMPLE.strip(),
        "",
        "`--set AXIS=VALUE` replaces values from the command line and wins over `override`. `--where` selects cells:",
        "`--where 'precision=fp32|bf16,size=small'`, with `|` between the values of one axis.",
        "Of zipped axes, set all of a group together.",
        "",
        *instruments(),
    ]
    shared = set(Params.model_fields)
    for name, task in sorted(all_tasks().items()):
        lines += ["", f"## {name}", "", summary(task), ""]
        lines += [*axis_table(task.params, set() if name == "train_step" else shared)]
        if name != "train_step":
            lines += [
                "",
                "It also has the axes " + ", ".join(f"`{axis}`" for axis in shared_order()) + ".",
            ]
    return "\n".join(lines) + "\n"


EXAMPLE = """
```yaml
name: mine                        # results/mine
defaults: {device: cuda}
limits: {timeout_s: 600, attempts: 3}
env: {PYTORCH_CUDA_ALLOC_CONF: "expandable_segments:True"}
grids:
  - task: train_step
    axes:                         # every combination is a cell
      size: [small, medium, large, xl, 2.7B]
      context_length: [128, 256, 512, 1024]
      precision: [fp32, tf32, bf16]
    fixed: {optimizer: fused}
    exclude: [{size: 2.7B, context_length: 1024}]
    override: [{when: {size: small}, set: {measured_steps: 50}}]
    include: [{size: small, context_length: 4096}]
  - task: train_step
    axes: {precision: [fp32, bf16], model_args.n_layer: [6, 12]}   # keys of a mapping are axes too
    zip:                          # the lists of a group advance together: 2 × 2 × 3 cells
      - {context_length: [512, 1024, 2048], batch_size: [16, 8, 4]}
    fixed: {model: "my_models:Gpt", model_args: {n_head: 8}}
```
"""


def instruments() -> Iterator[str]:
    """Yield the section of the instruments that a config may list."""
    default = SweepConfig.model_fields["instruments"].get_default(call_default_factory=True)
    yield "## Instruments"
    yield ""
    yield "The key `instruments` of a config lists what is recorded. `--instrument NAME` adds one."
    yield f"Without the key: `instruments: [{', '.join(default)}]`."
    yield ""
    yield "| instrument | what it records |"
    yield "|---|---|"
    names = instrument_names()
    for name, meaning in INSTRUMENTS.items():
        if name in names:
            yield f"| `{name}` | {meaning} |"


def shared_order() -> list[str]:
    return list(Params.model_fields)


def summary(task: Any) -> str:
    """Return the first line of the docstring of a task's module."""
    return (inspect.getdoc(sys.modules[task.build.__module__]) or "").partition("\n")[0]


def axis_table(params: type[Params], without: set[str]) -> Iterator[str]:
    yield "| axis | values | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in params.model_fields.items():
        if name in without:
            continue
        default = "" if field.default is PydanticUndefined else str(field.default)
        default = "" if default == "None" else default
        meaning = field.description or ""
        yield f"| `{field.alias or name}` | {values_of(field.annotation)} | {default} | {meaning} |"


def values_of(annotation: Any) -> str:
    """Return the words that an axis may have, or the kind of its values."""
    words = [word for word in _leaves(annotation) if isinstance(word, str)]
    if words:
        return ", ".join(words)
    kinds = {kind.__name__ for kind in _leaves(annotation) if isinstance(kind, type)}
    return ", ".join(sorted(kinds - {"NoneType"}))


def _leaves(annotation: Any) -> Iterator[Any]:
    arguments = get_args(annotation)
    if not arguments:
        yield annotation
    for argument in arguments:
        yield from _leaves(argument)


def tables_page() -> str:
    lines = [
        NOTE,
        "# Tables",
        "",
        "`sweep report RUN --table NAME` prints one of them. A table without rows is left out.",
        "",
    ]
    lines += ["| name | title | how to read it |", "|---|---|---|"]
    lines += [f"| `{table.name}` | {table.title} | {table.read} |" for table in TABLES]
    return "\n".join(lines) + "\n"


def statuses_page() -> str:
    lines = [NOTE, "# Statuses", "", "The column `status` of a cell or an attempt.", ""]
    lines += ["| status | meaning | tried again by the same command |", "|---|---|---|"]
    for status in Status:
        again = "yes" if status.is_retried else "no"
        lines.append(f"| `{status}` | {STATUSES[status]} | {again} |")
    lines += [
        "",
        "`sweep status`, `--retry` and `--only` know two more, for cells without a result:",
        "",
        f"- `{PENDING}`: not measured yet",
        f"- `{INCOMPLETE}`: measured, but some of its rows are missing; it is measured again",
    ]
    return "\n".join(lines) + "\n"


# Above this line, docs/columns.md is written by hand.
GENERATED_BELOW = "<!-- Below, made by `python docs/make_reference.py`: change the code. -->\n"


def columns_page() -> str:
    """Return docs/columns.md: its guide as it stands, then the columns of each table."""
    guide = (FOLDER.parent / "columns.md").read_text().partition(GENERATED_BELOW)[0]
    lines = [
        *("## cells", "", CELLS.strip(), *grouped_columns()),
        *("", "## Parameters", "", PARAMETERS.strip(), ""),
        *column_table("parameter", parameter_columns()),
    ]
    for table in STORED_TABLES:
        lines += ["", f"## {table.name}", "", table.doc, "", *column_table("column", table.fields)]
        for title, heading, rows in contents_of(table):
            lines += ["", title, "", *column_table(heading, rows)]
    return guide + GENERATED_BELOW + "\n" + "\n".join(lines) + "\n"


# The columns of `cells` by the question that they answer: the first pattern that the whole name matches.
QUESTIONS = {
    "Which cell is it, and how did it end?": "cell|task|run|status|stage|phase|attempts?|repetitions|"
    "started_at|invocation|message|reason|signal|exit_code|settings_changed",
    "Did memory run out, and where?": "(asked|allocated|reserved|free|total)_bytes|witness",
    "How long does a step take?": "(step|step_synced|repeated|{phase}|{phase}_pipelined)_ms_.*|"
    "interval_wide|timing_.*|drain_ms",
    "What took the time of the attempt?": "wall_s|time_.*|processing_.*",
    "Is it CPU-bound, or was it disturbed?": "cpu_bound.*|cpu_contended|.*_lead_ms|host_pace_.*|"
    "waited_for_core|concurrent_attempts|(sm|memory)_clock_.*|temperature_.*|throttle_.*|.*_capped_ns",
    "How fast is it for this hardware, and what does it cost?": "tokens_per_s|tokens_per_joule|tokens|"
    "parameters|.*flops|flops_reason|[mh]fu|ceiling_.*|.*joule.*|energy_j|.*power_.*",
    "Which hardware and software?": "host|gpu|gpu_uuid|torch|cuda|driver|python|cpu|commit|program_source",
    "Was it computed as requested?": ".*dtype|dtype_.*|float32_matmul_precision|matmul_allow_tf32|"
    "attention_(asked|used|seen|kernels)|optimizer_steps_skipped",
    "What did torch.compile do?": "compile_.*",
    "Which kernels ran, and was the GPU busy?": ".*busy.*|idle_.*|.*kernel_time_ms.*|attributed_.*|"
    "profile.*|trace_bytes",
    "How do several GPUs work together?": ".*coll.*|bus.*|algbw.*|call_ms|(of_)?link.*|.*skew.*|"
    "slowest_.*|(exposed|overlap)_.*|(compute|comm|transfer|wait)_ms|tokens_per_s_per_gpu|nccl.*",
    "How much memory is predicted?": "predicted_.*|(closed_form|formula)_.*|at_least_bytes",
    "What does the memory snapshot show?": "snapshot.*",
    "How much memory does it take?": ".*(peak|held|after)_.*bytes|outside_allocator_bytes",
    "What is saved for the backward pass?": "saved_.*|residual_.*|.*square.*",
    "How large are the errors of narrow numbers?": "sum|error|autocast_loss|(wide|narrow|library)_.*",
}


def grouped_columns() -> Iterator[str]:
    """Yield a table of columns for each question, and one of the others, if there are any."""
    groups: dict[str, list[Any]] = {question: [] for question in (*QUESTIONS, "Others")}
    for column in cell_columns():
        matching = (one for one, names in QUESTIONS.items() if re.fullmatch(names, column.name))
        groups[next(matching, "Others")].append(column)
    groups = {question: columns for question, columns in groups.items() if columns}
    yield ""
    for question in groups:
        anchor = re.sub(r"[^\w -]", "", question).lower().replace(" ", "-")
        yield f"- [{question}](#{anchor})"
    for question, columns in groups.items():
        yield from ("", f"### {question}", "", *column_table("column", columns))


CELLS = """
One row per cell. A run has the columns that its instruments and tasks fill; `run.columns` lists them. A name
with braces stands for several columns: `{phase}` is any phase of a step, `step` the whole step, `{statistic}` one of
n, mean, sd, min, median, ci_low, ci_high and coverage. `ci_low` to `ci_high` is the interval of the median. Each column
stands below the question that it answers.
"""
PARAMETERS = """
Parameters distinguish cells. The README lists the tasks that have each of them, and their defaults. A
parameter is null if the cell's task does not have it, if it belongs to the other `timing`, or if the model is named by
another parameter.
"""


def contents_of(table: StoredTable) -> Iterator[tuple[str, str, list[Any]]]:
    """Yield what may be in a table's columns: their values, keys of JSON objects, and metrics."""
    for field in table.fields:
        if field.values:
            words = [SimpleNamespace(name=str(name), doc=doc) for name, doc in field.values.items()]
            yield f"Values of `{field.name}`:", field.name, words
    if table.name == "attempts":
        described = {column.name for column in cell_columns()}
        others = [fact for fact in FACTS if fact.name not in described]
        yield "Keys of `facts` that are no columns of `cells`, which has the others:", "key", others
        yield "Keys of `evidence`:", "key", list(EVIDENCE)
    if table.name == "samples":
        for instrument in dict.fromkeys(metric.instrument for metric in METRICS):
            own = [metric for metric in METRICS if metric.instrument == instrument]
            yield f"Metrics of `{instrument}`:", "metric", own
    if table.name == "predictions":
        yield "Metrics:", "metric", list(PREDICTED_METRICS)


def column_table(heading: str, rows: Iterable[Any]) -> Iterator[str]:
    """Yield a Markdown table, without the column of units if no row has one."""
    rows = list(rows)
    has_units = any(getattr(row, "unit", "") for row in rows)
    yield f"| {heading} | unit | meaning |" if has_units else f"| {heading} | meaning |"
    yield "|---|---|---|" if has_units else "|---|---|"
    for row in rows:
        name = f"`{row.name}`" if row.name else "(empty)"
        unit = f" {row.unit} |" if has_units else ""
        yield f"| {name} |{unit} {row.doc} |"


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
