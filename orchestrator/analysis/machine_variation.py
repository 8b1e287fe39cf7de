"""How far the same cell may lie from a number on another machine: what runs were seen to differ by, on one kind of GPU.

The interval of a median says what steps of one process differ by, repetitions what processes do. Neither says what machines of
one kind do, whose CPUs differ: only the same cells, measured in several runs on several of them. A time that is CPU-bound is held
against another in additions as well, where both were told in them: so it depends less on how fast either CPU was. What the
kernels of a step take is the GPU's alone, also where the step is CPU-bound.

cells of several runs ─each cell with itself in another run─ ratios ─95 %, by what decides the known time─→ a factor
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from orchestrator.analysis.axes import NOTHING
from orchestrator.analysis.cpu_bound import Decides, decides
from orchestrator.analysis.results import Results
from orchestrator.report.export.redaction import called
from orchestrator.report.tables.cell_filters import having
from orchestrator.report.tables.formatters import HOST_MARK, SLOWER_HOST_MARK
from orchestrator.report.tables.layouts import Header, Rows
from orchestrator.store.layout import RUN_SEPARATOR

RUN = "run"  # the axis that several runs read together have
LIKELY = 0.95
LEAST = 40  # ratios, each of two times and its inverse: 95 % of fewer are all of them
MADE_WITH = (
    "gpu",
    "torch",
    "cuda",
)  # what a time may be expected to depend on, wherever it is measured
_SAME = ["own", *MADE_WITH]  # what both have
_EVERY = "all"
_MARKS = {
    Decides.GPU: "",
    Decides.SLOWER_HOST: f" ({SLOWER_HOST_MARK})",
    Decides.HOST: f" ({HOST_MARK})",
}
_TIMES = {
    "ms": "step_ms_median",
    "additions": "step_additions_median",
    "kernels": "step_kernel_time_ms_median",
}
_timed = having(*_TIMES.values())


@dataclass(frozen=True)
class Kind:
    """Of times: what decides the known one, None for whatever does; and what they are of, or told in."""

    whose: Decides | None
    told_in: Literal["ms", "additions", "kernels"] = "ms"

    def __str__(self) -> str:
        return f"where {self.title}" if self.whose else f"of the {self.title}"

    @property
    def title(self) -> str:
        """With the mark that such times have in tables."""
        if self.whose is None:
            return "kernels alone"
        return f"{self.whose}{_MARKS[self.whose]}" + (
            ", in additions" if self.told_in == "additions" else ""
        )


IN_ADDITIONS, OF_KERNELS = Kind(Decides.HOST, "additions"), Kind(None, "kernels")
KINDS = (*map(Kind, Decides), IN_ADDITIONS, OF_KERNELS)
Factors = Mapping[Kind, float]


def pairs(cells: pd.DataFrame) -> pd.DataFrame:
    """Of cells of several runs, each time with that of the same cell in every other: `known` and `other`, the names of the runs,
    `gpu`, `decides`, what the known one is of, and `ms`, `additions` and `kernels`, the logarithm of the other over the known in
    these.

    Both have the same kind of GPU, torch and CUDA. Runs that share a GPU, and with it a machine, say nothing of others.
    """
    if not {RUN, "gpu"} <= set(cells):
        return pd.DataFrame(
            {
                name: pd.Series(dtype=object)
                for name in ("known", "other", "gpu", "decides", *_TIMES)
            }
        )
    known = _timed(cells)
    timed = known.assign(own=_own(known), decides=decides(known)).reindex(
        columns=[*_SAME, RUN, "decides", *_TIMES.values()]
    )
    timed = timed[timed["gpu"].notna()]
    both = timed.merge(timed, on=_SAME, suffixes=("", "_other"))
    both = both[
        (both["decides"].notna() | both[_TIMES["kernels"]].notna())
        & _on_other_machines(cells, both)
    ]
    return pd.DataFrame(
        {
            "known": both[RUN],
            "other": both[f"{RUN}_other"],
            "gpu": both["gpu"],
            "decides": both["decides"],
            **{
                name: np.log((both[f"{column}_other"] / both[column]).astype(float))
                for name, column in _TIMES.items()
            },
        }
    )


def _on_other_machines(cells: pd.DataFrame, both: pd.DataFrame) -> pd.Series[bool]:
    gpus = {run: gpus_of(own) for run, own in cells.groupby(RUN)}
    named = zip(both[RUN], both[f"{RUN}_other"], strict=True)
    apart = [one != other and gpus[one].isdisjoint(gpus[other]) for one, other in named]
    return pd.Series(apart, index=both.index, dtype=bool)


def gpus_of(cells: pd.DataFrame) -> set[str]:
    """As they are called where they are published, so that a run and what was published of it have the same."""
    return (
        {called(uuid) for uuid in cells["gpu_uuid"].dropna().unique()}
        if "gpu_uuid" in cells
        else set()
    )


def share_a_gpu(cells: pd.DataFrame, others: pd.DataFrame) -> bool:
    """And with it a machine."""
    return not gpus_of(cells).isdisjoint(gpus_of(others))


def without_machines_of(cells: pd.DataFrame, others: pd.DataFrame) -> pd.DataFrame:
    """The cells of those runs that share no GPU with `others`."""
    theirs = gpus_of(others)
    return cells.groupby(RUN).filter(lambda own: gpus_of(own).isdisjoint(theirs))


def factors(found: pd.DataFrame) -> Factors:
    """By what at most 95 % of these pairs differ, either way, by the kind of time; without what has too few."""
    known = {kind: _logs(kind, found).abs() for kind in KINDS}
    return {
        kind: math.exp(float(logs.quantile(LIKELY)))
        for kind, logs in known.items()
        if len(logs) >= LEAST
    }


def _logs(kind: Kind, found: pd.DataFrame) -> pd.Series[float]:
    of_them = found if kind.whose is None else found[found["decides"] == kind.whose]
    return of_them[kind.told_in].dropna()


def within(ratio: float, kind: Kind, known: Factors) -> bool | None:
    """Whether a time is as far from a known one as another machine of its kind may be; None where that is not known."""
    return abs(math.log(ratio)) <= math.log(known[kind]) if kind in known else None


@dataclass(frozen=True)
class Machines:
    """The factors of all runs together; then of each run how much of it lies within those of the others, without it."""

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        found = pairs(results.cells)
        kinds = [kind for kind in KINDS if kind.told_in == "ms" or len(_logs(kind, found))]
        header = [RUN, *(title for kind in kinds for title in _titles(kind))]
        if not len(found):
            return header, []
        without = {
            str(run): found[(found["known"] != run) & (found["other"] != run)]
            for run in results.cells[RUN].unique()
        }
        mine = {run: found[found["other"] == run] for run in without}
        rows = [_row(_EVERY, kinds, found, found.iloc[:0])]
        return header, [
            *rows,
            *(
                _row(run, kinds, others, mine[run])
                for run, others in without.items()
                if len(mine[run])
            ),
        ]


def _titles(kind: Kind) -> tuple[str, str, str]:
    return f"{kind.title}: × or ÷", f"{kind.title}: runs", f"{kind.title}: pairs within"


def _row(run: str, kinds: Sequence[Kind], others: pd.DataFrame, mine: pd.DataFrame) -> list[str]:
    known = factors(others)
    return [run, *(text for kind in kinds for text in _texts(kind, known, others, mine))]


def _texts(
    kind: Kind, known: Factors, others: pd.DataFrame, mine: pd.DataFrame
) -> tuple[str, str, str]:
    """The factor, of how many runs it is, and how many pairs of this run are within it."""
    if kind not in known:
        return NOTHING, NOTHING, NOTHING
    pairs_of_it = others.loc[_logs(kind, others).index]
    runs = set(pairs_of_it["known"]) | set(pairs_of_it["other"])
    said = [within(math.exp(log), kind, known) for log in _logs(kind, mine)]
    return (
        f"{known[kind]:.3f}",
        str(len(runs)),
        f"{sum(map(bool, said))} of {len(said)}" if said else NOTHING,
    )


def of_several_runs(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells that were timed in more than one run."""
    if RUN not in cells:
        return cells.iloc[:0]
    timed = _timed(cells)
    return timed[_own(timed).duplicated(keep=False)]


def _own(cells: pd.DataFrame) -> pd.Series[str]:
    """The ids without the names of the runs before them."""
    return cells["cell"].str.rsplit(RUN_SEPARATOR, n=1).str[-1]  # also where there is none
