"""The `run` command: config → cells → plan → attempts → outcomes → parts. Each arrow is a function of another module."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from orchestrator.common.errors import EnvironmentError, GpusLost, NodesLost, SweepError
from orchestrator.config.grid import Expansion, expand, require_effect, require_matches
from orchestrator.config.schema import SweepConfig, load_config, validate_config, with_instruments
from orchestrator.config.selection import Selection, parse_selection
from orchestrator.config.yaml_source import Source
from orchestrator.execution import nsys
from orchestrator.execution.attempt import recover
from orchestrator.execution.measuring_process import PROGRAM_SOURCE, git_commit
from orchestrator.hardware.gpu_catalog import GpuModel, gpu_from_driver, matches_kind
from orchestrator.planning.attempt_queue import Queue
from orchestrator.planning.fingerprints import check_fingerprints, known_fingerprints
from orchestrator.planning.invocation import INVOCATION, new_invocation
from orchestrator.planning.memory_prediction import cap_bytes, predict_memory, verdict_of
from orchestrator.planning.plan import BESIDE, FLAWS, Choice, Plan, make_plan, read_history
from orchestrator.planning.prior_results import (
    describe_kept,
    how_asked,
    read_kept,
    require_same_env,
)
from orchestrator.planning.resumption import describe_going_on, going_on, note_finished
from orchestrator.scheduling.multi_gpu import leave_out_wider
from orchestrator.scheduling.one_at_a_time import OneByOne
from orchestrator.scheduling.ray_scheduler import Scheduler
from orchestrator.store.manifest import require_sweep
from orchestrator.store.remote.address import Where
from orchestrator.store.remote.remote_run import open_run
from orchestrator.store.run import Run, RunWriter
from orchestrator.sweep.console import Display, so_many
from tasks.prediction.records import Prediction, why_not
from tasks.spec.attempt import Attempt, Settings, StartMethod
from tasks.spec.cell import Cell
from tasks.spec.outcome import Outcome
from tasks.spec.parameters import default_values
from tasks.spec.registry import all_tasks
from tasks.spec.status import Status

if TYPE_CHECKING:
    import pandas as pd

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
_SAVING_S = 5.0  # kept of a time limit for ending the cells and writing cells.parquet


@dataclass(frozen=True)
class Request:
    """What a command line asks for, resolved: which cells of which config, in which folder.

    searching: whether these cells are steps of a search, beside the sweep that the folder is of.
    """

    config: SweepConfig
    selection: Selection
    expansion: Expansion
    source: Source
    run: Run
    config_path: Path
    searching: bool = False

    @property
    def import_paths(self) -> tuple[str, ...]:
        """Where a model of one's own is looked for: the folder one is in, and the config's."""
        return tuple(
            dict.fromkeys(str(path) for path in (Path.cwd(), self.config_path.parent.absolute()))
        )


@dataclass
class Summary:
    """What a run did. stopped: why it ended before its cells did, if so; late: cells not begun for want of time.

    elsewhere: those that cannot be measured here. late_s: what the shortest of the late ones is expected to take. before: the
    statuses of all cells when it began.
    given_up: how many cells were left alone since they had failed too often.
    broken: what ended it before, where that is for the user to mend. cells: how many it measured, however often; left: how many
    it did not, or not as often as it was to.
    flaws: by flaw, how many of the cells that it measured have it.
    foreseen: cells left out because they were predicted to run out of memory. inferred: those that were inferred to, and not
    measured; verified: those that were measured all the same, now or inferred before; refuted: which of them fit.
    """

    statuses: Counter[Status] = field(default_factory=Counter)
    recovered: int = 0
    stopped: str = ""
    broken: SweepError | None = None
    late: int = 0
    elsewhere: int = 0
    late_s: float | None = None
    before: Counter[str] = field(default_factory=Counter)
    cells: int = 0
    left: int = 0
    given_up: int = 0
    flaws: Counter[str] = field(default_factory=Counter)
    foreseen: int = 0
    inferred: int = 0
    verified: int = 0
    refuted: tuple[Cell, ...] = ()

    @property
    def is_at_its_end(self) -> bool:
        """Whether nothing is left that another run would do."""
        return not (self.stopped or self.broken or self.late or self.elsewhere)

    @property
    def measured(self) -> Counter[Status]:
        """By status, what was measured."""
        return Counter(
            {
                status: count
                for status, count in self.statuses.items()
                if status is not Status.OOM_INFERRED
            }
        )


def resolve(
    path: Path,
    sets: Sequence[str],
    wheres: Sequence[str],
    out: Where | None,
    sample: float | None = None,
    instruments: Sequence[str] = (),
) -> Request:
    """out: a folder, or the address of one elsewhere. Raises ConfigError, or RunUnreachable."""
    config, source = load_config(path)
    config = with_instruments(config, instruments)
    selection = parse_selection(sets, wheres, sample, instruments)
    expansion = expand(config, source, selection)
    require_matches(config, source)
    require_effect(expansion)
    run = open_run(out or config.results or Path("results") / config.name)
    return Request(config, selection, expansion, source, run, path)


def resolve_again(run: Run) -> Request:
    """The request that a run folder was last written for. Raises RunError where no sweep ran in it."""
    manifest = run.require().read_manifest()
    require_sweep(manifest, run)
    source = Source(f"{run}/run.json", manifest["config"])
    config = validate_config(manifest["config"], source)
    selection = Selection(**manifest["selection"])
    return Request(
        config,
        selection,
        expand(config, source, selection),
        source,
        run,
        Path(manifest["config_path"]),
    )


def plan_request(request: Request, choice: Choice) -> Plan:
    history = read_history(request.run)
    if choice.retry & set(FLAWS):
        for flaw, cells in _flawed(_load_cells(request.run)).items():
            history |= {
                cell: replace(history[cell], flaws=history[cell].flaws | {flaw}) for cell in cells
            }
    return make_plan(request.expansion.cells, history, choice, request.config.limits.attempts)


@dataclass(frozen=True)
class Means:
    """How a run goes about it.

    open_scheduler: for attempts like the one it is given.
    mixed: whether results of another fingerprint may join those of the folder. start_method: of each cell's process.
    skip_predicted_oom: whether cells are left out that are predicted to run out of memory. say: tells the user what happens
    before the first cell begins. more_follows: whether the command has not come to its end with these cells.
    """

    open_scheduler: Callable[[Attempt], Scheduler]
    open_display: Callable[[int, Callable[[], float | None]], Display]
    time_limit_s: float | None = None
    mixed: bool = False
    start_method: StartMethod | None = None
    skip_predicted_oom: bool = False
    more_follows: bool = False
    say: Callable[[str], None] = lambda text: None


def run_sweep(request: Request, choice: Choice, means: Means) -> Summary:
    """Measures what the plan says. Everything finished is kept, however this ends."""
    if BESIDE in choice.retry:
        means = _one_at_a_time(means)
    limit = means.time_limit_s
    deadline = None if limit is None else time.monotonic() + limit - _SAVING_S
    summary, commit = Summary(), git_commit()
    with _handlers_kept(), request.run.opened_for_writing() as writer:
        writer.require_parts()
        summary.recovered = _recover(writer, commit)
        invocation = new_invocation(
            request, choice, commit, means.more_follows, means.skip_predicted_oom
        )
        choice = going_on(request, choice, invocation)
        for line in describe_going_on(request, choice):
            means.say(line)
        plan = plan_request(request, choice)
        summary.before = plan.statuses()
        summary.given_up = sum(decision.given_up for decision in plan.decisions)

        kept = read_kept(request.run, plan)
        if not means.mixed and plan.to_run:
            require_same_env(request.run, plan, request.config)
        for line in describe_kept(kept, request.config, invocation):
            means.say(line)

        measured = set[str]()

        def keep(outcome: Outcome) -> None:
            writer.append(_measured_by(invocation, outcome), commit)
            summary.statuses[outcome.status] += 1
            if outcome.status is not Status.OOM_INFERRED:
                measured.add(outcome.attempt.cell.id)

        settings = make_settings(request, means.start_method)
        queue = Queue(
            request.run,
            request.expansion.cells,
            plan,
            settings,
            deadline,
            keep if choice.infer_oom else None,
        )
        if plan.to_run:
            with _stoppable(deadline, summary) as arm:
                _measure(request, writer, queue, means, summary, keep, invocation, arm)
        elif not request.run.exists:
            writer.write_manifest(manifest_of(request, known_fingerprints(request.run), invocation))
        summary.late, summary.late_s, summary.elsewhere = queue.late, queue.late_s, queue.elsewhere
        if summary.is_at_its_end and not means.more_follows:
            note_finished(writer, invocation)
        summary.inferred = queue.still_inferred
        summary.verified, summary.refuted = queue.verified, tuple(queue.refuted)
        summary.left, summary.cells = queue.left, len(measured)
        summary.flaws.update(
            {flaw: len(measured & cells) for flaw, cells in _derive(writer).items()}
        )
    return summary


def _measured_by(invocation: Mapping[str, Any], outcome: Outcome) -> Outcome:
    told = {
        **invocation["asked"],
        PROGRAM_SOURCE: invocation.get(PROGRAM_SOURCE),
        INVOCATION: invocation["time"],
    }
    return replace(outcome, facts={**outcome.facts, **told})


def _one_at_a_time(means: Means) -> Means:
    return replace(means, open_scheduler=lambda example: OneByOne(means.open_scheduler(example)))


def make_settings(request: Request, start_method: StartMethod | None) -> Settings:
    config = request.config
    return Settings(
        timeout_s=config.limits.timeout_s,
        instruments=tuple(config.instruments),
        env=dict(config.env),
        host_memory_gib=config.limits.host_memory_gib,
        import_paths=request.import_paths,
        start_method=start_method,
    )


def _measure(
    request: Request,
    writer: RunWriter,
    queue: Queue,
    means: Means,
    summary: Summary,
    keep: Callable[[Outcome], None],
    invocation: Mapping[str, Any],
    arm: Callable[[], None],
) -> None:
    scheduler = means.open_scheduler(queue.example())
    arm()  # Ray takes SIGTERM for itself when it starts
    try:
        environments = scheduler.environments()
        for line in niced(environments):
            means.say(line)
        require_devices(request, queue.devices, environments)
        fingerprints = check_fingerprints(request.run, environments, queue, means.mixed)
        kinds = _check_kinds(queue, environments, scheduler, means)
        leave_out_wider(queue, environments, means.say)
        if queue.infers:
            _require_one_kind_of_gpu(fingerprints, queue)
        writer.write_manifest(manifest_of(request, fingerprints, invocation))
        if nsys.INSTRUMENT in request.config.instruments and not nsys.program():
            means.say(
                "nsys is not on the PATH here: where it is not, cells are measured without it"
            )
        scheduler.prepare(queue.example())
        _foresee(request, writer, queue, means, summary, environments)
        queue.arrange(
            {device: scheduler.places(device) for device in queue.devices},
            first_gpu(environments),
            kinds,
        )
        display = means.open_display(queue.total, queue.remaining_s)
        try:
            for outcome in scheduler.run(queue, display.started):
                keep(outcome)
                queue.finished(outcome)
                display.finished(outcome)
        except (GpusLost, NodesLost) as error:
            summary.broken = error
        finally:
            display.close()
    finally:
        scheduler.close()


def _foresee(
    request: Request,
    writer: RunWriter,
    queue: Queue,
    means: Means,
    summary: Summary,
    environments: Sequence[Mapping[str, Any]],
) -> None:
    """Predicts what memory the cells will take, keeps that beside what is measured, and leaves out what is asked."""
    cells = [cell for cell in queue.cells if not why_not(cell)]
    if not cells:
        return
    means.say(f"predicting the memory of {so_many(len(cells))}")
    cards = {
        kind: smallest_card(environments, kind) for kind in {cell.params.gpu_kind for cell in cells}
    }
    predictions: dict[str, Prediction] = {}
    for kind, card in cards.items():
        own = [cell for cell in cells if cell.params.gpu_kind == kind]
        predictions |= predict_memory(own, card, request.import_paths)
    verdicts = {
        cell.id: verdict_of(cell, predictions[cell.id], cards[cell.params.gpu_kind])
        for cell in cells
    }
    writer.append_predictions(
        {cell: found.samples_with(verdicts[cell]) for cell, found in predictions.items()}
    )
    if means.skip_predicted_oom:
        doomed = [cell for cell in cells if verdicts[cell.id] == "oom"]
        for cell in doomed:
            why = predictions[cell.id].why_oom(cap_bytes(cell, cards[cell.params.gpu_kind]))
            means.say(f"left out: {request.expansion.label(cell)}: {why}")
        queue.leave_out(doomed)
        summary.foreseen = len(doomed)


def niced(environments: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Of each host where what measures waits for whatever else runs there."""
    for here in environments:
        if here.get("nice", 0) > 0:
            yield (
                f"on {here['host']} cells run at niceness {here['nice']}, so that a busy neighbour slows them: "
                "begin without nice, and Ray with RAY_worker_niceness=0"
            )


def first_gpu(environments: Sequence[Mapping[str, Any]]) -> str | None:
    """By the name that its driver gives."""
    return next((str(gpu["name"]) for here in environments for gpu in here.get("gpus", [])), None)


def smallest_card(
    environments: Sequence[Mapping[str, Any]], kind: str | None = None
) -> GpuModel | None:
    """Of the GPUs that a cell may come to, the one with the least memory."""
    gpus = [
        gpu
        for here in environments
        for gpu in here.get("gpus", [])
        if kind is None or matches_kind(gpu["name"], kind)
    ]
    cards = [gpu_from_driver(gpu["name"], gpu["memory_bytes"]) for gpu in gpus]
    return min(cards, key=lambda card: card.usable_bytes, default=None)


def require_devices(
    request: Request, devices: Iterable[str], environments: Sequence[Mapping[str, Any]]
) -> None:
    """Raises EnvironmentError where one of them is on no host."""
    have = sorted(
        {
            name
            for environment in environments
            for name, marks in environment["fingerprints"].items()
            if marks
        }
    )
    for device in sorted(set(devices).difference(have)):
        raise EnvironmentError(
            f"{request.source.name}: asks for device {device}, and here there is only {', '.join(have)}",
            f"Add --set device={have[0]} to measure there, or see `sweep doctor`",
        )


def _check_kinds(
    queue: Queue, environments: Sequence[Mapping[str, Any]], scheduler: Scheduler, means: Means
) -> dict[str, int]:
    """How many cells there is room for at once, by the kind of GPU that they ask for. Those that ask for one that is not here
    are left out, for another run to measure. Raises EnvironmentError where that is all of them.
    """
    there = sorted({str(gpu["name"]) for here in environments for gpu in here.get("gpus", [])})
    for here in environments if queue.kinds else ():
        if len({gpu["name"] for gpu in here.get("gpus", [])}) > 1:
            raise EnvironmentError(
                f"gpu_kind: {here['host']} has GPUs of several kinds, and only hosts are told apart",
                "Set CUDA_VISIBLE_DEVICES",
            )
    places = {kind: scheduler.places("cuda", kind) for kind in sorted(queue.kinds)}
    missing = [kind for kind, count in places.items() if not count]
    if missing:
        left_out = [cell for cell in queue.cells if cell.params.gpu_kind in missing]
        said = f"{len(left_out)} cells ask for gpu_kind {', '.join(missing)}, and here there is {', '.join(there) or 'no GPU'}"
        remedy = "Have such a node join (`ray start --address=…`), or --set gpu_kind=A100, or whatever Ray calls what is here"
        if len(left_out) == len(queue.cells):
            raise EnvironmentError(said, remedy)
        queue.leave_to_another_run(left_out)
        means.say(f"left out: {said}. Given again with it, this command measures them")
    elif not queue.kinds and len(there) > 1 and "cuda" in queue.devices:
        means.say(
            f"GPUs of several kinds, {', '.join(there)}: cells come to any of them. --set gpu_kind=A,B has each on both"
        )
    return places


def _require_one_kind_of_gpu(
    fingerprints: Mapping[str, Sequence[Mapping[str, Any]]], queue: Queue
) -> None:
    """What ran out of memory on one kind says nothing of another. Raises EnvironmentError."""
    kinds = sorted({str(mark.get("gpu")) for mark in fingerprints.get("cuda", [])})
    if len(kinds) > 1 and not queue.names_kinds:
        raise EnvironmentError(
            f"--infer-oom: there are GPUs of several kinds: {', '.join(kinds)}", "Leave it out"
        )


def manifest_of(
    request: Request, fingerprints: dict[str, list[dict[str, Any]]], invocation: Mapping[str, Any]
) -> dict[str, Any]:
    before = request.run.read_manifest()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    sweep = {
        "config_path": str(request.config_path),
        "config": request.config.model_dump(mode="json"),
        "selection": asdict(request.selection),
        "asked": len(request.expansion.cells),
    }
    if request.searching and "config" in before:
        sweep = {name: before[name] for name in sweep if name in before}
    return {
        "name": request.config.name,
        "program": _program_version(),
        "commit": invocation["commit"],
        "created": before.get("created", now),
        "updated": now,
        **sweep,
        "fingerprints": fingerprints,
        "defaults": {**before.get("defaults", {}), **_defaults(request.config)},
        "invocations": [*before.get("invocations", []), invocation],
    }


def _defaults(config: SweepConfig) -> dict[str, dict[str, Any]]:
    return {grid.task: default_values(all_tasks()[grid.task].params) for grid in config.grids}


def _program_version() -> str:
    try:
        return version("transformer-sweep")
    except PackageNotFoundError:
        return "source"


def _recover(writer: RunWriter, commit: str | None) -> int:
    """Keeps what was measured for a driver that died before it could write it down."""
    before = writer.read_manifest()
    last: dict[str, Any] = (before.get("invocations") or [{}])[-1]
    invocation = {
        "time": None,
        "asked": how_asked(before.get("config", {})),
        **last,
    }  # programs of before kept the sweep's alone
    recorded = writer.rows("attempts", ["cell", "attempt"])
    outcomes = [outcome for attempt in writer.unrecorded(recorded) if (outcome := recover(attempt))]
    for outcome in outcomes:
        writer.append(_measured_by(invocation, outcome), last.get("commit", commit))
    writer.merge_parts()
    return len(outcomes)


def _derive(writer: RunWriter) -> dict[str, set[str]]:
    """Writes the row of each cell; gives those with each flaw."""
    cells = _load_cells(writer)
    writer.write_cells(cells)
    return _flawed(cells)


def _load_cells(run: Run) -> pd.DataFrame:
    from orchestrator.analysis.results import load_results

    return load_results(run).cells


def _flawed(cells: pd.DataFrame) -> dict[str, set[str]]:
    """The cells with each flaw."""
    from orchestrator.analysis.cpu_bound import flagged

    return {flaw: flagged(cells, flaw) for flaw in FLAWS}


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """What stops a run is handled after the body as it was before it."""
    before = {number: signal.getsignal(number) for number in _STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _handle(handler: Any) -> None:
    for number in _STOPS:
        signal.signal(number, handler)


@contextmanager
def _stoppable(deadline: float | None, summary: Summary) -> Iterator[Callable[[], None]]:
    """Ctrl-C, a polite kill and the time limit end the body, once: what is still to be done then is not interrupted, nor is what
    follows on the body until its handlers are put back.

    They may strike anywhere in it: the store withstands that as it withstands a kill. Gives the function that installs
    the handlers, for after something else has taken them.
    """
    import pandas  # noqa: F401  an import that is interrupted cannot be done again, and pyarrow's first table has this one

    def stop(number: int, frame: FrameType | None) -> None:
        _handle(signal.SIG_IGN)
        summary.stopped = "time limit" if number == signal.SIGALRM else signal.Signals(number).name
        raise KeyboardInterrupt  # the one exception that Ray lets pass while it waits

    with _handlers_kept():
        _handle(stop)
        if deadline is not None:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, deadline - time.monotonic()))
        try:
            yield lambda: _handle(stop)
        except KeyboardInterrupt:
            if not summary.stopped:
                raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    if summary.stopped:
        _handle(signal.SIG_IGN)
