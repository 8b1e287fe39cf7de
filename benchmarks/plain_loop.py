"""Does `sweep` report what a plain loop would? Both measure the same cells, each in fresh processes, one after the other.

    python benchmarks/plain_loop.py results/full [--where size=xl] [--repeat 2]

The plain loop knows nothing of this project but its model: build, warm up, then synchronise and time, step by step.
Prints plain / sweep for every eager training cell of the run that ended well; beside 1.00 stands whether the two agree
within 2 %, or within the interval of the median of either (its noise). Exit code 1 if some do not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pandas as pd
from tabulate import tabulate

from orchestrator.report.statistics import median_rank

TOLERANCE = 0.02
LOOP = """
import json, sys, time, torch
from contextlib import nullcontext
from model.config import SIZES
from model.optimizer import OPTIMIZERS
from model.transformer import TransformerLM
p = json.loads(sys.argv[1])
device = p["device"]
wait = torch.cuda.synchronize if device == "cuda" else lambda: None
torch.set_float32_matmul_precision("high" if p["precision"] == "tf32" else "highest")
low = {"bf16": torch.bfloat16}.get(p["precision"])
cast = lambda: torch.autocast(device, dtype=low) if low else nullcontext()
with torch.device(device):
    model = TransformerLM(SIZES[p["year"]][p["size"]], p["context_length"], p["vocab_size"])
    x, y = torch.randint(p["vocab_size"], (2, p["batch_size"], p["context_length"]))
optimizer = OPTIMIZERS[p["optimizer"]](model.parameters())
times = []
for _ in range(p["warmup_steps"] + p["measured_steps"]):
    wait(); start = time.perf_counter()
    optimizer.zero_grad()
    with cast():
        loss = torch.nn.functional.cross_entropy(model(x).view(-1, p["vocab_size"]), y.view(-1))
    loss.backward()
    optimizer.step()
    wait(); times.append((time.perf_counter() - start) * 1e3)
print(json.dumps(times[p["warmup_steps"]:]))
"""
AXES = ("device", "year", "size", "context_length", "batch_size", "vocab_size", "precision", "optimizer", "warmup_steps",
        "measured_steps")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--where", default="", help="axis=value,axis=value")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    cells = choose(pd.read_parquet(options.run / "cells.parquet"), options.where)
    rows = [compare(cell) for cell in cells.to_dict("records")]
    print(tabulate(rows, headers="keys", tablefmt="pipe"))
    if options.json:
        options.json.write_text(json.dumps(rows))
    agreeing = sum(row["agrees"] == "yes" for row in rows)
    print(f"\n{agreeing} of {len(rows)} agree")
    sys.exit(agreeing != len(rows))


def choose(cells: pd.DataFrame, where: str) -> pd.DataFrame:
    cells = cells[(cells["status"] == "ok") & (cells["compile"] == "eager") & (cells["pass"] == "train_step")]
    for clause in filter(None, where.split(",")):
        axis, value = clause.split("=")
        cells = cells[cells[axis].astype(str) == value]
    return cells


def compare(cell: dict[str, object]) -> dict[str, object]:
    params = {axis: cell[axis] for axis in AXES}
    plain = sorted(measure(params))
    rank = median_rank(len(plain))
    low, high, median = plain[rank - 1], plain[-rank], statistics.median(plain)
    row: dict[str, object] = {axis: cell[axis] for axis in ("size", "context_length", "precision")}
    row |= {"plain ms": round(median, 2), "interval": f"[{low:.2f}, {high:.2f}]"}
    agrees = True
    for name, stem in (("synced", "step_ms"), ("pipelined", "step_pipelined_ms")):
        ours = cell.get(f"{stem}_median")
        if ours is None or pd.isna(ours):
            continue
        row |= {f"{name} ms": round(ours, 2), f"plain/{name}": round(median / ours, 3)}
        if name == "synced":
            overlap = low <= cell[f"{stem}_ci_high"] and high >= cell[f"{stem}_ci_low"]
            agrees = abs(median / ours - 1) <= TOLERANCE or overlap
    return {**row, "agrees": "yes" if agrees else "NO"}


def measure(params: dict[str, object]) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-c", LOOP, json.dumps(params, default=int)], capture_output=True, text=True, check=True
    )
    times: list[float] = json.loads(done.stdout.splitlines()[-1])
    return times


if __name__ == "__main__":
    main()
