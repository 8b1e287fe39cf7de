"""Predicted memory of a run's compiled cells, compared with what was measured.

    python benchmarks/compiled_memory.py results/published/h200/full
    python benchmarks/compiled_memory.py RUN --where size=small --where pass=train_step

Needs no GPU. Prints how many percent each prediction is too high (+) or too low (-), as lowest,
median and highest error of the cells with one pass, precision and size: for the allocated peak of
a steady step, and for the most memory that the allocator reserved. Predictions are cached; the
first time, each takes seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from orchestrator.analysis.results import read_attempts
from orchestrator.hardware.gpu_catalog import find_gpu
from orchestrator.planning.prediction_requests import predict_memory
from orchestrator.store.run import Run
from tasks.prediction.records import Prediction
from tasks.spec.cell import Cell
from tasks.spec.registry import make_cell
from tasks.spec.status import Status

GROUPS = ["pass", "precision", "size"]
ERRORS = ["allocated", "reserved"]
MOST_TOO_HIGH, MOST_TOO_LOW = 0.05, -0.02  # the last lines count the cells beyond these errors


def main() -> None:
    """Predict the compiled cells of a run, and print the errors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--where", action="append", default=[], metavar="AXIS=VALUE")
    options = parser.parse_args()
    run = Run(options.run)
    cells = compiled_cells(run, dict(word.split("=", 1) for word in options.where))
    if not cells:
        sys.exit(f"{options.run}: no compiled cell was measured on a GPU")
    predictions = predict_memory(cells, find_gpu("H200"), ())
    print("\n".join(describe(errors_of(cells, predictions, measured_peaks(run)))))


def compiled_cells(run: Run, conditions: Mapping[str, str]) -> list[Cell]:
    """Return the compiled cells that succeeded on a GPU and have these values."""
    cells = {}
    for row in read_attempts(run, ["task", "params", "status"]).to_dict("records"):
        values = json.loads(row["params"])
        is_chosen = all(str(values.get(axis)) == value for axis, value in conditions.items())
        is_compiled = values.get("compile", "eager") != "eager" and values["device"] == "cuda"
        if is_chosen and is_compiled and row["status"] == Status.OK:
            cell = make_cell(row["task"], values)
            cells[cell.id] = cell
    return list(cells.values())


def measured_peaks(run: Run) -> pd.DataFrame:
    """Return the measured bytes by cell: `allocated` in a steady step, and `reserved` in any."""
    samples = run.read("samples")
    samples = samples[samples["instrument"] == "memory"]
    steady = samples[samples["mode"] == "steady"]
    allocated = steady[steady["metric"] == "peak_allocated_bytes"]
    reserved = samples[samples["metric"] == "peak_reserved_bytes"]
    return pd.DataFrame(
        {
            "allocated": allocated.groupby("cell")["value"].max(),
            "reserved": reserved.groupby("cell")["value"].max(),
        }
    )


def errors_of(
    cells: list[Cell], predictions: Mapping[str, Prediction], measured: pd.DataFrame
) -> pd.DataFrame:
    """Return a row per cell: its values, how it was predicted, and errors as fractions."""
    peaks = measured.to_dict("index")
    rows = []
    for cell in cells:
        prediction = predictions[cell.id]
        errors = {
            "allocated": (prediction.peak_bytes() or 0) / peaks[cell.id]["allocated"] - 1,
            "reserved": (prediction.reserved_bytes or 0) / peaks[cell.id]["reserved"] - 1,
        }
        rows.append({**cell.params.values(), "how": prediction.how, **errors})
    return pd.DataFrame(rows)


def describe(errors: pd.DataFrame) -> list[str]:
    """Return a table of the errors by pass, precision and size, and lines about all cells."""
    rows = []
    for names, group in errors.groupby(GROUPS, sort=False):
        rows.append([*map(str, names), str(len(group)), *(_spread(group[name]) for name in ERRORS)])
    header = [*GROUPS, "cells", *(f"{name}: lowest, median, highest error" for name in ERRORS)]
    lines = [pd.DataFrame(sorted(rows), columns=header).to_string(index=False), ""]
    for name in ERRORS:
        values = errors[name]
        close = (values.abs() <= MOST_TOO_HIGH).mean()
        low = (values < MOST_TOO_LOW).sum()
        lines.append(
            f"{name}: {close:.1%} of {len(values)} cells within {MOST_TOO_HIGH:.0%};"
            f" {low} more than {-MOST_TOO_LOW:.0%} too low; errors {_spread(values)}"
        )
    how = errors["how"].value_counts()
    lines.append("predicted: " + ", ".join(f"{count} {name}" for name, count in how.items()))
    return lines


def _spread(errors: pd.Series[float]) -> str:
    return f"{errors.min():+.1%}  {errors.median():+.1%}  {errors.max():+.1%}"


if __name__ == "__main__":
    main()
