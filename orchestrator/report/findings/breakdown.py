"""Findings on the parts of a step: its passes, the GPU's work in it, and its kernels."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.analysis import kernels as kernel_rows
from orchestrator.analysis.axes import MAIN, ordered_values
from orchestrator.analysis.cpu_bound import depends_on_cpu
from orchestrator.analysis.pairs import TIME, measured, preferring, select
from orchestrator.analysis.results import Results
from orchestrator.common.text import counted
from orchestrator.report.findings import finding
from orchestrator.report.findings.finding import Finding
from orchestrator.report.text.cell_names import scope_of
from orchestrator.report.text.numbers import number, percent, ratio, span

_WITH_KERNELS = "attributed_to_phase"  # a column that cells with kernels have
_ABOUT_EQUAL = 0.05  # medians of ratios closer to 1 are no difference that a reader looks for
_BACKWARD, _FORWARD = "backward_ms_median", "forward_ms_median"


def about_backward(results: Results) -> Iterator[Finding]:
    """Yield how long the backward pass takes, compared with the forward pass of the same cell."""
    cells = preferring(measured(results, "train_step", _BACKWARD, _FORWARD), MAIN)
    cells = finding.warmest(results, cells)
    is_free = ~depends_on_cpu(cells)
    on_gpu = finding.has_cell_with(cells, "device", "cuda")
    shown = finding.main_run(select(cells, is_free) if is_free.any() else cells)
    if shown.empty or "precision" not in shown:
        return
    ratios = (shown[_BACKWARD] / shown[_FORWARD]).astype(float)
    middle, kind = ratios.median(), "GPU-bound cell" if is_free.any() and on_gpu else "cell"
    texts = [finding.median_of(len(shown), kind)]
    texts += finding.by_precision(ratios, shown, results.axes, "{ratio} in {name}")
    is_certain = bool(ratios.min() > 1 or ratios.max() < 1)
    takes = "takes longer than" if middle > 1 else "takes less time than"
    if abs(middle - 1) <= _ABOUT_EQUAL:
        takes = "takes about as long as"
    elif not is_certain:
        takes = "takes longer in some cells and less time in others than"
    yield Finding(
        "backward / forward",
        ratio(middle),
        span(ratios),
        f"The backward pass {takes} the forward pass.",
        finding.sentence_of(texts),
        counted(len(shown), kind),
        basis=finding.basis_of_cells(shown),
        is_cpu_bound=kind == "cell" and on_gpu,
        is_clear=is_certain,
    )


def about_busy_time(results: Results) -> Iterator[Finding]:
    """Yield how much of a step the GPU works, in the cells with the least and the most."""
    steps = measured(results, "train_step", "busy_timed")
    steps = finding.warmest(results, finding.main_run(preferring(steps, MAIN)))
    steps = steps[steps["device"] == "cuda"] if "device" in steps else steps
    if steps.empty:
        return
    least, most = (finding.extreme(steps, "busy_timed", largest) for largest in (False, True))
    idle = max(1 - float(least["busy_timed"]), 0.0)
    spread, detail = "", ""
    if len(steps) > 1:
        spread = f"to {percent(most['busy_timed'])}"
        detail = f" In {scope_of(most)}, kernels run for {percent(most['busy_timed'])} of the step."
    yield Finding(
        "GPU busy",
        percent(least["busy_timed"]),
        spread,
        f"The GPU waits for the CPU in {percent(idle)} of the step of {scope_of(least)}.",
        f"Kernels run for {number(least['busy_timed'] * least[TIME])} of its"
        f" {number(least[TIME])} ms.{detail}",
        scope_of(least),
        idle,
        finding.basis_of_cells(steps),
        bool(depends_on_cpu(steps.loc[[least.name]]).item()),
    )


def about_kernels(results: Results) -> Iterator[Finding]:
    """Yield which share of kernel time are matrix products, and what takes most of the rest."""
    if _WITH_KERNELS not in results.cells:
        return
    kernels = results.kernels().dropna(subset="ms")
    cells = select(results.cells, results.cells["cell"].isin(kernels["cell"]))
    cells = finding.main_run(preferring(cells, MAIN))
    if cells.empty or "precision" not in cells:
        return
    same = finding.matched_on(cells, "precision", results.axes)
    cells = same if len(same) else preferring(cells, {"precision": cells["precision"].iloc[0]})
    kernels = kernels[kernels["cell"].isin(cells["cell"])]
    by_class = kernels.pivot_table("ms", "cell", "kernel_class", "sum", fill_value=0.0)
    shares = by_class.div(by_class.sum(axis=1), axis=0)
    precision = cells.set_index("cell")["precision"].astype(str).reindex(shares.index)
    medians = shares.groupby(precision).median()
    order = [name for name in ordered_values("precision", precision) if name in medians.index]
    products = medians.get(kernel_rows.GEMM, medians.iloc[:, 0] * 0.0)
    others = medians.drop(columns=kernel_rows.GEMM, errors="ignore").loc[order[-1]]
    texts = [f"{percent(products[name])} in {name}" for name in order]
    time = "kernel time" if finding.has_cell_with(cells, "device", "cuda") else "time of operators"
    median = finding.median_of(len(shares) // len(order), "cell")
    detail = [f"{median} in each precision" if median and len(order) > 1 else median]
    if len(others):
        rest = f"{others.idxmax()} ({percent(others.max())} in {order[-1]})"
        detail.append(f"of the rest, most is {rest}")
    yield Finding(
        "matrix products",
        percent(products[order[-1]]),
        f"in {order[-1]}" + (f"; {texts[0]}" if len(texts) > 1 else ""),
        f"Matrix products take {texts[0].replace(' in ', f' of the {time} in ')}"
        f"{''.join(f', {text}' for text in texts[1:])}.",
        finding.sentence_of(detail),
        f"{counted(len(shares), 'cell')} with kernels",
        basis=finding.basis_of_cells(cells),
    )


def about_softmax(results: Results) -> Iterator[Finding]:
    """Yield how long the softmax of attention takes, compared with its two matrix products."""
    if _WITH_KERNELS not in results.cells:
        return
    kernels = kernel_rows.inside_operators(results.kernels())
    kernels = kernels[kernels["phase"] == "forward"]
    cells = select(results.cells, results.cells["cell"].isin(kernels["cell"]))
    cells = finding.main_run(preferring(select(cells, cells["task"] == "train_step"), MAIN))
    ratios, rows = {}, kernel_rows.rows_by_cell(kernels[kernels["cell"].isin(cells["cell"])])
    for cell, own in rows.items():
        softmax, matmul = kernel_rows.softmax_and_products_ms(own)
        if softmax and matmul:
            ratios[cell] = softmax / matmul
    cells = select(cells, cells["cell"].isin(list(ratios)))
    if cells.empty:
        return
    cells = cells.assign(softmax_ratio=cells["cell"].map(ratios))
    row = finding.extreme(cells, "softmax_ratio", largest=True)
    own = rows[row["cell"]]
    softmax = kernel_rows.ms_of_parts(own, ("softmax",)) or 0.0
    share = softmax / sum(kernel_rows.sums(own, "phase").values())
    more = "longer than" if row["softmax_ratio"] > 1 else "less time than"
    yield Finding(
        "softmax / its products",
        ratio(row["softmax_ratio"]),
        span(cells["softmax_ratio"]),
        f"The softmax of attention takes {more} the two matrix products around it.",
        f"{ratio(row['softmax_ratio'])} as long, and {percent(share)} of the forward pass, in"
        f" {scope_of(row)}{f': the most of {len(cells):,} cells' if len(cells) > 1 else ''}.",
        scope_of(row),
        basis=[(row["cell"],)],
    )
