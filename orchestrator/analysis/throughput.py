"""Columns of cells that relate the step time to the work done and to the GPU's peak.

FLOPs are those of the model's closed form. Work that is repeated, such as a recomputed forward
pass, does not count.
"""

from __future__ import annotations

import pandas as pd

from orchestrator.analysis.derived_fields import derived
from orchestrator.hardware.gpu_catalog import peak_tflops as catalog_peak
from orchestrator.store.layout import RUN_SEPARATOR
from tasks.spec.fields import Format


@derived(
    "tokens_per_s",
    "tokens per second, from the median step time",
    "tokens/s",
    Format.COUNT,
    needs=("tokens", "step_ms_median"),
)
def tokens_per_s(cells: pd.DataFrame) -> pd.Series[float]:
    return cells["tokens"] / cells["step_ms_median"] * 1e3


@derived(
    "achieved_tflops",
    "`flops` per second, from the median step time",
    "TFLOP/s",
    needs=("flops", "step_ms_median"),
)
def achieved_tflops(cells: pd.DataFrame) -> pd.Series[float]:
    return cells["flops"] / cells["step_ms_median"] * 1e-9


@derived(
    "peak_tflops",
    "dense peak of the GPU in the cell's precision, by its maker; null if no source gives it",
    "TFLOP/s",
    needs=("achieved_tflops", "precision"),
)
def peak_tflops(cells: pd.DataFrame) -> pd.Series[float]:
    pairs = zip(_gpus(cells), cells["precision"], strict=True)
    peaks = [catalog_peak(gpu, precision) for gpu, precision in pairs]
    return pd.Series(pd.array(peaks, dtype="Float64"), index=cells.index)


@derived(
    "mfu",
    "model FLOPs utilisation: `achieved_tflops` over `peak_tflops`",
    style=Format.PERCENT,
    needs=("achieved_tflops", "peak_tflops"),
)
def mfu(cells: pd.DataFrame) -> pd.Series[float]:
    return cells["achieved_tflops"] / cells["peak_tflops"]


@derived(
    "ceiling_tflops",
    "fastest matrix product in that precision, measured by the same run on that GPU",
    "TFLOP/s",
    needs=("achieved_tflops", "precision"),
)
def ceiling_tflops(cells: pd.DataFrame) -> pd.Series[float]:
    # bf16_pure stores weights in bf16, but multiplies with the same tensor cores as bf16.
    precision = cells["precision"].replace({"bf16_pure": "bf16"})
    runs = cells["cell"].str.rpartition(RUN_SEPARATOR)[
        0
    ]  # of a collection: the run that a cell belongs to
    keys = zip(runs, _gpus(cells).fillna(""), cells["device"], precision, strict=True)
    key_of_cell = pd.Series(list(keys), index=cells.index)
    products = cells[(cells["task"] == "matmul") & cells["achieved_tflops"].notna()]
    fastest = products["achieved_tflops"].groupby(key_of_cell[products.index]).max()
    return key_of_cell.map(fastest)


@derived(
    "ceiling_share",
    "`achieved_tflops` over `ceiling_tflops`",
    style=Format.PERCENT,
    needs=("achieved_tflops", "ceiling_tflops"),
)
def ceiling_share(cells: pd.DataFrame) -> pd.Series[float]:
    return cells["achieved_tflops"] / cells["ceiling_tflops"]


def _gpus(cells: pd.DataFrame) -> pd.Series[str]:
    return cells["gpu"] if "gpu" in cells else pd.Series(None, index=cells.index, dtype=object)
