"""Columns of cells that relate the step time to the work done and to the GPU's peak.

FLOPs are those of the model's closed form, or else those that its prediction counted. Work that is
repeated, such as a recomputed forward pass, counts in `hfu` only.
"""

from __future__ import annotations

import pandas as pd

from orchestrator.analysis.derived_fields import DERIVED_FIELDS, DerivedField, derived
from orchestrator.hardware.gpu_catalog import link_peak_gb_s
from orchestrator.hardware.gpu_catalog import peak_tflops as catalog_peak
from orchestrator.store.layout import RUN_SEPARATOR

DERIVED_FIELDS += [
    DerivedField(
        "tokens_per_s",
        "tokens per second, from the median step time",
        "tokens/s",
        ("tokens", "step_ms_median"),
        ratio=1e3,
    ),
    DerivedField(
        "achieved_tflops",
        "`flops` per second, from the median step time",
        "TFLOP/s",
        ("flops", "step_ms_median"),
        ratio=1e-9,
    ),
    DerivedField(
        "joules_per_token",
        "energy of the GPU with its memory, without the CPU: `timed_power_w` over `tokens_per_s`",
        "J",
        ("timed_power_w", "tokens_per_s"),
        ratio=1,
    ),
    DerivedField(
        "tokens_per_joule",
        "tokens for each joule that the GPU with its memory used",
        "tokens/J",
        ("tokens_per_s", "timed_power_w"),
        ratio=1,
    ),
    DerivedField(
        "call_ms",
        "one call of a collective, from the median step time",
        "ms",
        ("step_ms_median", "collective_calls"),
        ratio=1,
    ),
    DerivedField(
        "algbw_gb_s",
        "algorithm bandwidth of nccl-tests: `collective_bytes` over the median step time",
        "GB/s",
        ("collective_bytes", "step_ms_median"),
        ratio=1e-6,
    ),
    DerivedField(
        "busbw_gb_s",
        "bus bandwidth of nccl-tests: `bus_bytes` over the median step time",
        "GB/s",
        ("bus_bytes", "step_ms_median"),
        ratio=1e-6,
    ),
    DerivedField(
        "of_link",
        "`busbw_gb_s` over `link_peak_gb_s`; above 1 where a switch reduces (NVLink SHARP)",
        "ratio",
        ("busbw_gb_s", "link_peak_gb_s"),
        ratio=1,
    ),
]


@derived(
    "tokens_per_s_per_gpu",
    "`tokens_per_s` over the number of GPUs; null without a GPU",
    "tokens/s",
    needs=("tokens_per_s", "gpus"),
)
def tokens_per_s_per_gpu(cells: pd.DataFrame) -> pd.Series[float]:
    """Return the tokens per second of one GPU."""
    return cells["tokens_per_s"] / cells["gpus"].where(cells["device"] == "cuda")


@derived(
    "link_peak_gb_s",
    "peak of the slowest pair of the cell's GPUs, each way, by the maker; null if `link` is unknown",
    "GB/s",
    needs=("link",),
)
def link_peak(cells: pd.DataFrame) -> pd.Series[float]:
    """Return the peak of the link of each cell with several GPUs."""
    return cells["link"].map(link_peak_gb_s, na_action="ignore").astype("Float64")


@derived(
    "exposed_ms",
    "communication that no computing hid: `exposed_transfer_ms` and `exposed_wait_ms`",
    "ms",
    needs=("exposed_transfer_ms", "exposed_wait_ms"),
)
def exposed_ms(cells: pd.DataFrame) -> pd.Series[float]:
    """Return the communication that lengthens the step."""
    return cells["exposed_transfer_ms"] + cells["exposed_wait_ms"]


@derived(
    "peak_tflops",
    "dense peak of the cell's GPUs in its precision, by their maker; null if no source gives it",
    "TFLOP/s",
    needs=("achieved_tflops", "precision"),
)
def peak_tflops(cells: pd.DataFrame) -> pd.Series[float]:
    """Return the peak of all GPUs of each cell."""
    gpus = cells["gpu"].dropna() if "gpu" in cells else cells["cell"][:0]  # none on the CPU
    peaks = list(map(catalog_peak, gpus, cells["precision"][gpus.index]))
    of_one = pd.Series(pd.array(peaks, dtype="Float64"), index=gpus.index).reindex(cells.index)
    return of_one * cells["gpus"].fillna(1).astype("Float64") if "gpus" in cells else of_one


DERIVED_FIELDS += [
    DerivedField(
        "mfu",
        "model FLOPs utilisation: `achieved_tflops` over `peak_tflops`",
        "ratio",
        ("achieved_tflops", "peak_tflops"),
        ratio=1,
    ),
]


@derived(
    "hfu",
    "hardware FLOPs utilisation: `mfu` with what the backward pass computes again",
    "ratio",
    needs=("mfu", "flops", "recomputed_flops"),
)
def hfu(cells: pd.DataFrame) -> pd.Series[float]:
    """Return the utilisation of cells with checkpoints."""
    return cells["mfu"] * (1 + cells["recomputed_flops"] / cells["flops"])


@derived(
    "ceiling_tflops",
    "fastest matrix product in that precision, measured by the same run on that GPU",
    "TFLOP/s",
    needs=("achieved_tflops", "precision"),
)
def ceiling_tflops(cells: pd.DataFrame) -> pd.Series[float]:
    """Return the fastest matrix product that can be compared with each cell."""
    # bf16_pure stores weights in bf16, but multiplies with the same tensor cores as bf16.
    precision = cells["precision"].replace({"bf16_pure": "bf16"})
    # In a collection, ids of cells start with the name of their run.
    runs = cells["cell"].str.rpartition(RUN_SEPARATOR)[0]
    gpus = cells["gpu"].fillna("") if "gpu" in cells else [""] * len(cells)
    keys = zip(runs, gpus, cells["device"], precision, strict=True)
    key_of_cell = pd.Series(list(keys), index=cells.index)
    products = cells[(cells["task"] == "matmul") & cells["achieved_tflops"].notna()]
    fastest = products["achieved_tflops"].groupby(key_of_cell[products.index]).max()
    return key_of_cell.map(fastest)


DERIVED_FIELDS += [
    DerivedField(
        "ceiling_share",
        "`achieved_tflops` over `ceiling_tflops`",
        "ratio",
        ("achieved_tflops", "ceiling_tflops"),
        ratio=1,
    ),
]
