"""How fast this machine is just now. A bound of time is a promise about work, and machines of many tenants halve their pace."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Of what our commands consist, without a line of ours: imports, hashes, JSON, sorting, tables. It took 1.25 to 2.0 s on the two
# cores on which the bounds were set, by their pace of the hour.
_WORK = """
import hashlib, json
import pandas, pyarrow
rows = [{"cell": hashlib.sha256(str(n).encode()).hexdigest(), "step": n % 7, "value": n / 3} for n in range(60_000)]
rows = sorted(json.loads(json.dumps(rows)), key=lambda row: row["cell"])
pyarrow.Table.from_pylist(rows).to_pandas().groupby("step").value.median()
"""


def takes_less_than(limit_s: float, taken_s: Callable[[], float], tries: int = 3) -> bool:
    """Whether what took so much processor time takes less on a machine that needs one second for the work above. Of a few tries
    one will do, each between two looks at the pace."""
    return any(_paced(taken_s) < limit_s for _ in range(tries))


def processor_s(command: Sequence[str]) -> float:
    """Of a command and all that it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _paced(taken_s: Callable[[], float]) -> float:
    before = _work_s()
    taken = taken_s()
    return taken / ((before + _work_s()) / 2)


def _work_s() -> float:
    return processor_s([sys.executable, "-c", _WORK])
