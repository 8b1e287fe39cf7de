"""The policy of the gate: how large a change of each quantity may be. Its YAML is validated here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from orchestrator.analysis.axes import axis_text
from tasks.spec.axes import Values

_PERCENTAGE = r"^\d+(\.\d+)?\s*%$"


def _to_share(value: object) -> object:
    """Return a percentage such as `2%` as 0.02. A number without the sign could mean either."""
    if isinstance(value, str) and re.match(_PERCENTAGE, value):
        return float(value.rstrip("% ")) / 100
    raise ValueError("is not a percentage, such as 2%")


Share = Annotated[
    float,
    BeforeValidator(_to_share),
    Field(ge=0, le=1),
    WithJsonSchema({"type": "string", "pattern": _PERCENTAGE}),
]
Action = Literal["fail", "report"]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class StepLimits(_Strict):
    """Limits of the step time, which is judged on one machine only."""

    gpu_bound: Share = Field(0.02, description="change of the time of GPU-bound steps")
    cpu_bound: Literal["report"] | Share = Field(
        "report",
        description="change of CPU-bound steps, counted in small operations of the CPU instead of ms;"
        " from 20 rounds on. `report`: they are shown, and judged by their kernel time",
    )


class KernelLimits(_Strict):
    """Limits of the kernel time, which does not depend on the CPU."""

    same_machine: Share = Field(0.02, description="change between two runs of one machine")
    other_machine: Share = Field(
        0.03, description="change between runs of two machines, or of two compilations"
    )


class CompileLimits(_Strict):
    """Limits of torch.compile."""

    graph_breaks: int = Field(0, ge=0, description="graph breaks more than in A")
    recompiles: int = Field(0, ge=0, description="recompilations more than in A")


class StatusActions(_Strict):
    """Actions for a cell that A measured and that has no result in B."""

    oom: Action = Field("fail", description="it runs out of memory")
    failed: Action = Field("fail", description="it fails in another way")
    missing: Action = Field("report", description="it is not in B")


class RoundCounts(_Strict):
    """Numbers of rounds in which `sweep ab` measures A and B in turn."""

    first: int = Field(2, ge=1, le=100, description="rounds of all cells")
    more: int = Field(3, ge=0, le=100, description="further rounds of the cells in doubt")


class CellLimits(_Strict):
    """Limits of the cells that match `when`."""

    when: Annotated[Values, Field(min_length=1, description="values of axes")]
    step: Share | None = Field(None, description="instead of `step.gpu_bound`")
    kernels: Share | None = Field(None, description="instead of both limits of `kernels`")
    memory: Share | None = Field(None, description="instead of `memory`")
    accept: str = Field("", description="why these cells may fail: they are shown and do not count")


class Policy(_Strict):
    """Limits of the gate, for all cells."""

    false_alarm: Share = Field(
        0.01,
        gt=0,
        description="probability that any cell of a comparison is SLOWER if nothing changed",
    )
    rounds: RoundCounts = RoundCounts()
    step: StepLimits = StepLimits()
    kernels: KernelLimits = KernelLimits()
    memory: Share = Field(0.01, description="growth of the peak memory")
    compile: CompileLimits = CompileLimits()
    status: StatusActions = StatusActions()
    at_least: Share = Field(0.9, description="share of cells that must be decided")
    cells: tuple[CellLimits, ...] = Field(
        (), strict=False, description="other limits for some cells; the last match counts"
    )

    def of_cell(self, values: Mapping[str, object]) -> Policy:
        """Return the policy with the limits of a cell, whose axes have these values."""
        policy = self
        for limits in self.cells:
            if not limits_match(limits, values):
                continue
            changed: Values = {}
            if limits.step is not None:
                changed["step"] = self.step.model_copy(update={"gpu_bound": limits.step})
            if limits.kernels is not None:
                both = dict.fromkeys(KernelLimits.model_fields, limits.kernels)
                changed["kernels"] = self.kernels.model_copy(update=both)
            if limits.memory is not None:
                changed["memory"] = limits.memory
            policy = policy.model_copy(update=changed)
        return policy

    def acceptance(self, values: Mapping[str, object]) -> str:
        """Return why a cell may fail; empty if it may not."""
        reasons = [limits.accept for limits in self.cells if limits_match(limits, values)]
        return next(filter(None, reversed(reasons)), "")


# It finds a slow-down of 2 % in 98 % of the cases, with 40 cells (benchmarks/gate.py).
STRICT_LIMITS: Mapping[str, Mapping[str, object]] = {
    "rounds": {"first": 3, "more": 4},
    "step": {"gpu_bound": "1%"},
    "kernels": {"same_machine": "1%"},
}
STRICT = Policy.model_validate(STRICT_LIMITS)


class PolicyFile(_Strict):
    """A policy file."""

    gate: Policy = Policy()


def limits_match(limits: CellLimits, values: Mapping[str, object]) -> bool:
    """Return True if a cell with these values has all values of `when`."""
    return all(
        name in values and axis_text(values[name]) == axis_text(wanted)
        for name, wanted in limits.when.items()
    )
