"""Columns of cells that relate the step time to the work done and to the GPU's peak."""

from __future__ import annotations

import pandas as pd

from orchestrator.hardware.gpu_catalog import peak_tflops
from orchestrator.store.layout import RUN_SEPARATOR


def with_rates(wide: pd.DataFrame) -> pd.DataFrame:
    """Tokens a second and achieved TFLOP/s, over the median of the whole step."""
    for rate, amount, scale in (
        ("tokens_per_s", "tokens", 1e3),
        ("achieved_tflops", "flops", 1e-9),
    ):
        if {"step_ms_median", amount} <= set(wide):
            wide[rate] = wide[amount] / wide["step_ms_median"] * scale
    return wide


def with_utilisation(wide: pd.DataFrame) -> pd.DataFrame:
    """How much of the possible was reached: model FLOPs over the peak of the precision, and over a measured ceiling.

    `mfu` is null for a GPU without a known peak, `of_ceiling` in a run that measured no matrix product in that precision
    on that GPU. FLOPs are those of the model's closed form: what is computed again does not count.
    """
    if not {"achieved_tflops", "precision"} <= set(wide):
        return wide
    gpus = wide["gpu"] if "gpu" in wide else pd.Series(None, index=wide.index, dtype=object)
    peaks = [
        peak_tflops(gpu, precision) for gpu, precision in zip(gpus, wide["precision"], strict=True)
    ]
    wide["peak_tflops"] = pd.array(peaks, dtype="Float64")
    wide["mfu"] = wide["achieved_tflops"] / wide["peak_tflops"]
    family = wide["precision"].replace({"bf16_pure": "bf16"})
    runs = wide["cell"].str.rpartition(RUN_SEPARATOR)[0]  # of cells that are read together
    place = pd.Series(
        list(zip(runs, gpus.fillna(""), wide["device"], family, strict=True)), index=wide.index
    )
    products = wide[(wide["task"] == "matmul") & wide["achieved_tflops"].notna()]
    ceilings = products["achieved_tflops"].groupby(place[products.index]).max()
    wide["ceiling_tflops"] = place.map(ceilings)
    wide["of_ceiling"] = wide["achieved_tflops"] / wide["ceiling_tflops"]
    return wide
