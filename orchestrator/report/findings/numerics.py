"""Findings of numerical experiments: sums, autocast and norms in low precision."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from orchestrator.analysis.results import Results
from orchestrator.report.findings.finding import Finding, basis_of_cells, cells_with
from orchestrator.report.text.numbers import number, percent

_NARROW = ("fp16", "bf16")
_WORST = 3  # norms that the sentence names
_DTYPES = {"fc1": "first linear", "norm": "norm", "logits": "logits", "loss": "loss",
           "gradients": "gradients"}  # fmt: skip


def about_sums(results: Results) -> Iterator[Finding]:
    """Yield what a sum in a narrow dtype loses, and what a wide accumulator saves of it."""
    cells = cells_with(results, "accumulation", "sum", "error", "value", "count")
    if cells.empty:
        return
    kinds = cells.groupby(["value", "count"])["accumulator"].nunique()
    value, count = list(kinds.index)[int(kinds.argmax())]
    same = cells[(cells["value"] == value) & (cells["count"] == count)]
    plain = same[~same["at_once"].fillna(False).astype(bool)]
    narrow = plain[(plain["accumulator"] == plain["addend"]) & plain["accumulator"].isin(_NARROW)]
    if narrow.empty:
        return
    narrow = narrow.sort_values("error", key=lambda error: error.abs(), ascending=False)
    lost = [f"{row['accumulator']} {_signed(row['error'])}" for _, row in narrow.iterrows()]
    wide = plain[(plain["accumulator"] == "fp32") & plain["addend"].isin(_NARROW)]
    wide = wide[~wide["upcast"].fillna(False).astype(bool)].sort_values("addend", ascending=False)
    in_wide = [f"{row['addend']} values {_signed(row['error'])}" for _, row in wide.iterrows()]
    worst = narrow.iloc[0]
    share = abs(worst["error"]) / abs(value * count)
    detail = f"Error of the sum in {', in '.join(lost)}."
    if in_wide:
        detail += f" In an fp32 sum: {', '.join(in_wide)}."
    yield Finding(
        f"sum in {worst['accumulator']}",
        _signed(worst["error"]),
        f"of {number(value * count)}",
        f"A sum of {count:,} times {value:g} in {worst['accumulator']} loses {percent(share)}.",
        detail,
        f"{count:,} times {value:g}",
        basis=basis_of_cells(pd.concat([narrow, wide])),
    )


def _signed(error: float) -> str:
    return f"{'+' if error > 0 else ''}{number(error, 2)}"


def about_autocast(results: Results) -> Iterator[Finding]:
    """Yield the dtypes of a small model under autocast, of each device and dtype."""
    columns = [f"dtype_{part}" for part in _DTYPES]
    cells = cells_with(results, "autocast_dtypes", *columns)
    if cells.empty:
        return
    for (device, autocast), own in cells.groupby(["device", "autocast"], sort=False):
        texts = []
        for part, name in _DTYPES.items():
            of_norms = own.groupby("norm", sort=False)[f"dtype_{part}"].first()
            if of_norms.nunique() == 1:
                texts.append(f"{name} {of_norms.iloc[0]}")
            else:
                texts += [f"{norm} {dtype}" for norm, dtype in of_norms.items()]
        logits, loss = own["dtype_logits"].iloc[0], own["dtype_loss"].iloc[0]
        yield Finding(
            f"loss in {autocast} autocast",
            str(loss),
            f"logits {logits}",
            f"Under autocast in {autocast} on {device}, logits are {logits} and the loss {loss}.",
            f"Results: {', '.join(texts)}.",
            f"on {device}",
            basis=basis_of_cells(own),
        )


def about_norms(results: Results) -> Iterator[Finding]:
    """Yield the norms that lose most if they compute in a narrow dtype."""
    cells = cells_with(results, "norm_sensitivity", "narrow_nonfinite")
    if cells.empty:
        return
    # A column without any value is not there.
    cells = cells.reindex(columns=cells.columns.union(["narrow_error", "library_error"]))
    # Where every value is NaN there is no error: that is worse than any.
    errors = cells["narrow_error"].astype(float).fillna(float("inf"))
    ranked = cells.assign(_error=errors).sort_values(
        ["narrow_nonfinite", "_error"], ascending=False, kind="stable"
    )
    worst = ranked.head(_WORST)
    texts = []
    for _, row in worst.iterrows():
        loss = f"error {number(row['narrow_error'], 2)} times the RMS"
        if row["narrow_nonfinite"] > 0:
            loss = f"{percent(row['narrow_nonfinite'])} of the values are not finite"
        norm = f"{row['norm']} in {row['dtype']}, scale {row['scale']:g}, eps {row['eps']:g}"
        texts.append(f"{norm}: {loss}")
    finite = ranked[ranked["_error"] < float("inf")]
    library = cells["library_error"].astype(float).max()
    yield Finding(
        "worst norm",
        number(finite["_error"].max(), 2) if len(finite) else "not finite",
        "times the RMS of the result" if len(finite) else "",
        f"A norm that computes in {worst.iloc[0]['dtype']} can lose its result.",
        f"The three worst of {len(cells)}: {'; '.join(texts)}. torch's own stay within"
        f" {number(library, 2)}.",
        f"{len(cells)} norms",
        basis=basis_of_cells(worst),
    )
