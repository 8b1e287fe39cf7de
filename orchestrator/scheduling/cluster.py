"""Health of the nodes of a Ray cluster: which live, which answer, and which get cells.

Ray reports a node whose connection closes. A node that freezes, or that the network cuts off, only
stops to count as alive, and a task that no node can run waits for ever. The driver therefore looks
at the list of nodes itself. Ray is passed in, so that tests can replace it.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from types import ModuleType
from typing import TypedDict, TypeVar

from orchestrator.common.errors import NoNodeLeft, PlatformError
from orchestrator.common.text import counted, format_seconds
from orchestrator.execution.events import AttemptStarted
from orchestrator.execution.host_probe import TIMEOUT_S
from orchestrator.hardware.gpu_catalog import matches_kind
from orchestrator.scheduling.scheduler import Notify
from tasks.spec.attempt import PREPARATION_S
from tasks.spec.cell import Cell
from tasks.spec.messages import error_text

GPU_TYPE_LABEL = "ray.io/accelerator-type"  # Ray labels each node with its first GPU
NODE_LABEL = "ray.io/node-id"

REPAIR_REMEDY = "Mend what `sweep doctor` says there"  # of a host that measures nothing

ANSWER_S = PREPARATION_S + TIMEOUT_S  # for a node to get this program, and to import torch
_BEGIN_S = 60.0  # for a node that has the program to begin a task
_LATE_S = 20.0  # after which the user sees which nodes have not answered
_LOOK_EVERY_S = 2.0
_JOIN_S = 300.0  # for another node to join
_POLL_S = 0.5
# A single worker may be killed for want of memory. Three in a row are the node's fault.
_MAX_CRASHES = 3
_CRASHING = "Ray's workers crash there"
_SEE_STATUS = "See `ray status`"

Answer = TypeVar("Answer")
Stream = TypeVar("Stream")


class Node(TypedDict):
    """An element of `ray.nodes()`."""

    NodeID: str
    NodeManagerHostname: str
    Alive: bool
    Labels: dict[str, str]
    Resources: dict[str, float]


def gpu_type(node: Node) -> str:
    """Return Ray's name of a node's GPUs, such as GeForce-RTX-5090, or an empty string."""
    if capacity(node, "GPU"):
        return str(node["Labels"].get(GPU_TYPE_LABEL, ""))
    return ""


def capacity(node: Node, resource: str) -> float:
    """Return how many "CPU" or "GPU" a node has, whether or not they are in use."""
    return float(node["Resources"].get(resource, 0))


class NodeHealth:
    """The nodes of a cluster, and those among them that get no cell because they are broken."""

    def __init__(self, ray: ModuleType, notify: Notify) -> None:
        self._ray, self._notify = ray, notify
        self.excluded: dict[str, str] = {}  # node id -> reason
        # Crashed workers of each node since a cell ended there.
        self._crashes: Counter[str] = Counter()
        self._looked_at = -math.inf
        self._missing_since: float | None = None

    def working(self) -> list[Node]:
        """Return the nodes that cells may run on."""
        return [node for node in self._living() if node["NodeID"] not in self.excluded]

    def _living(self) -> list[Node]:
        return list(filter(itemgetter("Alive"), self._ray.nodes()))

    def has_several_hosts(self) -> bool:
        """Return True if another host could replace a broken one."""
        return sum(map(_can_measure, self._living())) > 1

    def exclude(self, node: str, reason: str) -> None:
        """Give no cell to a node any longer."""
        if node not in self.excluded:
            self._notify(f"{reason}: it gets no other cell. {REPAIR_REMEDY}")
            self.excluded[node] = reason

    def ask_all(self, question: Callable[[], Answer]) -> list[Answer]:
        """Call a function on each working node and return the answers.

        Nodes that fail are excluded. Raises PlatformError if none answers.
        """
        answers, errors = self._ask(question, ANSWER_S)
        if not answers:
            unanswered = PlatformError("no node of the cluster answers", _SEE_STATUS)
            raise next(iter(errors), unanswered)
        return answers

    def _ask(
        self, question: Callable[[], Answer], limit_s: float, only: str = ""
    ) -> tuple[list[Answer], list[PlatformError]]:
        """Return the answers, and the errors of nodes that cannot answer.

        Args:
            only: one node to ask, if others can measure too. It is excluded if it fails; otherwise
                nodes that fail are excluded if another one answers.
        """
        # One retry, because a single worker may be killed.
        task = self._ray.remote(num_cpus=0, max_retries=1)(question)
        asked, hosts = {}, {}
        for node in self.working():
            name = node["NodeID"]
            if only in ("", name):
                asked[name] = task.options(label_selector={NODE_LABEL: name}).remote()
                hosts[asked[name]] = node["NodeManagerHostname"]
        self._wait_for(hosts, limit_s)
        answers, errors = list[Answer](), dict[str, PlatformError]()
        for name, answer in asked.items():
            try:
                answers += self._answer(answer, limit_s)
            except PlatformError as error:
                message = f"host {hosts[answer]}: {error.message}"
                errors[name] = PlatformError(message, error.remedy)
        if answers or only:
            for name, why in errors.items():
                self.exclude(name, why.message)
        return answers, list(errors.values())

    def _wait_for(self, hosts: Mapping[object, str], limit_s: float) -> None:
        """Wait for answers. `hosts` maps each to the host that it comes from."""
        if not hosts:
            return
        _, late = self._ray.wait(list(hosts), num_returns=len(hosts), timeout=_LATE_S)
        if late:
            names = ", ".join(sorted({hosts[answer] for answer in late}))
            self._notify(f"waiting for {names} to answer, for up to {format_seconds(limit_s)}")
            self._ray.wait(late, num_returns=len(late), timeout=limit_s - _LATE_S)

    def _answer(self, answer: object, limit_s: float) -> list[Answer]:
        """Return the answer in a list, which is empty for a node that is gone.

        Raises PlatformError.
        """
        ray = self._ray.exceptions
        try:
            return [self._ray.get(answer, timeout=_POLL_S)]
        except ray.RayTaskError as error:
            if isinstance(error.cause, PlatformError):
                # Ray's own error quotes the traceback.
                raise error.cause from error
            message = f"this program does not start there: {error.cause!r}"
            raise PlatformError(message, REPAIR_REMEDY) from error
        except (ray.TaskUnschedulableError, ray.NodeDiedError):
            # Ray lists a dead node as alive for a while.
            return []
        except ray.WorkerCrashedError as error:
            raise PlatformError(_CRASHING, _SEE_STATUS) from error
        except ray.GetTimeoutError as error:
            with suppress(Exception):
                self._ray.cancel(answer, force=True)
            message = f"no answer came from there in {format_seconds(limit_s)}"
            raise PlatformError(message, _SEE_STATUS) from error
        except ray.RuntimeEnvSetupError as error:
            # Ray's traceback comes before the last line.
            message = f"it does not receive this program: {error_text(error).splitlines()[-1]}"
            raise PlatformError(message, _SEE_STATUS) from error

    def note_success(self, node: str) -> None:
        """Forget the crashes of a node on which an attempt has ended by itself."""
        del self._crashes[node]

    def check(self, started: AttemptStarted, error: Exception) -> None:
        """Exclude the node of a lost supervisor if it cannot start another task.

        If the node is not known, all nodes are asked. A single host stays in use.
        """
        ray = self._ray.exceptions
        has_crashed = isinstance(error, ray.WorkerCrashedError)
        is_suspicious = has_crashed or isinstance(error, ray.RuntimeEnvSetupError)
        if not is_suspicious or not self.has_several_hosts():
            return
        self._crashes[started.node] += has_crashed
        if started.node and self._crashes[started.node] >= _MAX_CRASHES:
            self.exclude(started.node, f"host {self._host_of(started)}: {_CRASHING}")
            return
        with suppress(ray.RayError):  # the next event reports it
            self._ask(_do_nothing, _BEGIN_S, started.node)

    def _host_of(self, started: AttemptStarted) -> str:
        # An attempt that has not begun has a node already, and nobody has reported the host.
        nodes = self._ray.nodes()
        names = [one["NodeManagerHostname"] for one in nodes if one["NodeID"] == started.node]
        return started.host or next(iter(names), started.node)

    def find_lost(
        self, running: Mapping[Stream, AttemptStarted], waiting: Iterable[Cell] = ()
    ) -> list[Stream]:
        """Return the keys of attempts whose node is no longer alive.

        Raises NoNodeLeft if an attempt that has not begun, or a cell that nothing else keeps from
        starting, has waited for long, and no node could run it.
        """
        now = time.monotonic()
        if now - self._looked_at < _LOOK_EVERY_S:
            return []
        self._looked_at = now
        nodes = self._living()
        not_begun = [one.attempt.cell for one in running.values() if not one.host]
        self._require_nodes([*not_begun, *waiting], now)
        living = {"", *(node["NodeID"] for node in nodes)}
        return [key for key, started in running.items() if started.node not in living]

    def _require_nodes(self, waiting: Sequence[Cell], now: float) -> None:
        nodes = self.working()
        for cell in waiting:
            if not any(_has_room(node, cell) for node in nodes):
                break
        else:
            self._missing_since = None
            return
        lacking = f"no node is left that has {_requirement(cell)}"
        if self._missing_since is None:
            self._missing_since = now
            self._notify(f"{lacking}: waiting {format_seconds(_JOIN_S)} for one to join")
        elif now - self._missing_since > _JOIN_S:
            raise NoNodeLeft(
                lacking,
                "Have one join (`ray start --address=…`) and run again: "
                "finished cells are not measured again",
            )

    def unplaceable_reason(self, cell: Cell) -> str | None:
        """Return why no healthy node can run this cell, or None if one can or may.

        Raises NoNodeLeft if no host is left at all.
        """
        reasons, working = "; ".join(self.excluded.values()), self.working()
        # Without a broken node, one that fits may still join.
        if not reasons or any(_has_room(node, cell) for node in working):
            return None
        if not any(map(_can_measure, working)):
            raise NoNodeLeft(
                f"no host is left that measures: {reasons}",
                f"{REPAIR_REMEDY}, and run again: finished cells are not measured again",
            )
        return f"no host is left that could measure it: {reasons}"


def _do_nothing() -> None: ...


def _can_measure(node: Node) -> bool:
    # The head of a cluster may have no resources.
    return capacity(node, "CPU") > 0 or capacity(node, "GPU") > 0


def _has_room(node: Node, cell: Cell) -> bool:
    """Return True if the cell could run there if nothing else did."""
    params = cell.params
    if not params.gpu_count:
        return capacity(node, "CPU") >= 1
    has_kind = matches_kind(gpu_type(node), params.gpu_kind)
    return has_kind and capacity(node, "GPU") >= params.gpu_count


def _requirement(cell: Cell) -> str:
    params = cell.params
    if not params.gpu_count:
        return "a core"
    return counted(params.gpu_count, " ".join(filter(None, [params.gpu_kind, "GPU"])))
