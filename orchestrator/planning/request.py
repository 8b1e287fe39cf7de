"""A command line or a results folder, resolved to the cells that a sweep measures.

Paths and selections enter, a SweepRequest leaves. It is frozen: each stage of a sweep returns a
new one where it changes something.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from orchestrator.common.errors import ConfigError
from orchestrator.common.provenance import git_commit, package_version, program_source
from orchestrator.common.run_location import RunLocation, is_address, require_name
from orchestrator.config.grid import (
    REMEDIES_OF_RANKS,
    Expansion,
    expand,
    require_matches,
    require_ranks,
)
from orchestrator.config.grid_checks import task_params
from orchestrator.config.schema import SweepConfig, load_config, validate_config, with_instruments
from orchestrator.config.selection import Selection
from orchestrator.config.yaml_source import Source
from orchestrator.execution.program import search_path
from orchestrator.planning.invocation import (
    MEASUREMENT_SETTINGS,
    ExecutionOptions,
    Invocation,
    RunOptions,
    current_command,
    last_sweep,
)
from orchestrator.planning.named_modules import require_modules
from orchestrator.store.layout import MODELS
from orchestrator.store.manifest import BEST, require_sweep
from orchestrator.store.open import open_run
from orchestrator.store.run import Run
from tasks.spec.attempt import Attempt, Settings
from tasks.spec.axes import Values, select
from tasks.spec.cell import Cell
from tasks.spec.parameters import default_values
from tasks.spec.source_digest import HUB, MODEL_CONFIG, find_model_config, source_digest


def import_paths(config: Path, run: Run, models: Iterable[str]) -> tuple[str, ...]:
    """Return the folders with these models: this one, that of the config, and `models/` of the run.

    The last one only holds configs of models of transformers.
    """
    folders = [Path.cwd(), config.parent.absolute()]
    if any(name.startswith(HUB) for name in models):
        folders.append(run.folder.absolute() / MODELS)
    return tuple(dict.fromkeys(map(str, folders)))


@dataclass(frozen=True)
class SweepRequest:
    """Everything that a command asks for: cells of a config, how to measure them, and the folder.

    is_search: the cells are steps of a search, and not the sweep of the folder.
    beaten_ms: by the id of a cell, see `Settings`.
    """

    config: SweepConfig
    selection: Selection
    expansion: Expansion
    run: Run
    config_path: Path
    options: RunOptions = field(default_factory=RunOptions)
    execution: ExecutionOptions = field(default_factory=ExecutionOptions)
    is_search: bool = False
    beaten_ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def import_paths(self) -> tuple[str, ...]:
        """The folders with the user's models."""
        return import_paths(self.config_path, self.run, self.model_names)

    @cached_property
    def model_names(self) -> list[str]:
        """The models of the user, and those of transformers whose config is a file."""
        names = set()
        for cell in self.expansion.cells:
            model = getattr(cell.params, "model", None)
            if model and not getattr(cell.params, "is_preset", False):
                names.add(model)
        return sorted(names)

    def model_configs(self) -> dict[str, Path]:
        """Return config.json of each model of transformers, by its path in the run."""
        found = {}
        for model in self.model_names:
            name = model.removeprefix(HUB)
            is_inside = not Path(name).is_absolute() and ".." not in Path(name).parts
            if name == model or not is_inside:
                continue
            file = find_model_config(name, self.search_path)
            if file is not None:
                found[f"{MODELS}/{name}/{MODEL_CONFIG}"] = file
        return found

    @property
    def search_path(self) -> list[str]:
        """All folders that measuring processes import from, like sys.path."""
        return search_path(self.import_paths, self.config.env.get("PYTHONPATH"))

    @property
    def settings(self) -> Settings:
        """The settings of each attempt."""
        config = self.config
        return Settings(
            timeout_s=config.limits.timeout_s,
            instruments=tuple(config.instruments),
            env=dict(config.env),
            host_memory_gib=config.limits.host_memory_gib,
            collective_timeout_s=config.limits.collective_timeout_s,
            import_paths=self.import_paths,
            start_method=self.execution.start_method,
        )

    def example_attempt(self, cells: Sequence[Cell]) -> Attempt:
        """Return an attempt like those to come, which slots can be prepared for."""
        # The queue hands out CUDA cells first.
        cell = min(cells, key=lambda cell: cell.params.device != "cuda")
        return Attempt(cell, 0, str(self.run.attempt_folder(cell.id, 0)), self.settings)

    def new_invocation(self) -> Invocation:
        """Return the entry of run.json for this command, which starts now."""
        return Invocation(
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            command=current_command(),
            # A search repeats cells to confirm its answer, and not those of the folder's sweep.
            choice=(RunOptions() if self.is_search else self.options).to_json(),
            skips=self.execution.skip_predicted_oom,
            commit=git_commit(),
            program_source=program_source(),
            asked=select(self.config.model_dump(mode="json"), MEASUREMENT_SETTINGS),
            sources=self.model_sources(),
        )

    def model_sources(self) -> dict[str, str | None]:
        """Return the digest of the source of each of the user's models."""
        return {model: source_digest(model, self.search_path) for model in self.model_names}

    def is_recorded(self, invocation: Invocation) -> bool:
        """True if the last sweep of the folder is this command, with the config as it is now.

        A step of a search is recorded only where there is no run yet.
        """
        if self.is_search:
            return self.run.exists
        manifest, last = self.run.read_manifest(), last_sweep(self.run)
        stored = (manifest.get("config"), manifest.get("selection"), last.choice, last.skips)
        own = (
            self.config.model_dump(mode="json"),
            self.selection.to_json(),
            invocation.choice,
            invocation.skips,
        )
        return stored == own

    def manifest(
        self,
        fingerprints: Mapping[str, Sequence[Mapping[str, object]]],
        invocation: Invocation,
        host_gpus: Sequence[Mapping[str, int]] = (),
    ) -> Values:
        """Return the run's manifest with this sweep and one more invocation.

        host_gpus: as in the manifest; empty: those of the last command remain.
        """
        before, now = self.run.read_manifest(), datetime.now(UTC).isoformat(timespec="seconds")
        sweep = {
            "config_path": str(self.config_path),
            "config": self.config.model_dump(mode="json"),
            "selection": self.selection.to_json(),
            "asked": len(self.expansion.cells),
        }
        # A search asks for few cells of many, and the folder's sweep stays as it was.
        if self.is_search:
            del sweep["asked"]
            if "config" in before:
                sweep = select(before, (*sweep, "asked"))
        if known := host_gpus or before.get("host_gpus"):
            sweep["host_gpus"] = known
        program = package_version("transformer-sweep") or "source"
        defaults = {grid.task: default_values(task_params(grid)) for grid in self.config.grids}
        return {
            "name": self.config.name,
            "program": program,
            "commit": invocation.commit,
            "created": before.get("created", now),
            "updated": now,
            **sweep,
            "fingerprints": fingerprints,
            # A report hides axes at their default, and later versions may have other defaults.
            "defaults": {**before.get("defaults", {}), **defaults},
            "invocations": [*before.get("invocations", []), vars(invocation)],
            **select(before, [BEST]),
        }


def resolve(path: Path, selection: Selection, out: RunLocation | None = None) -> SweepRequest:
    """Read a config and select its cells.

    out: a folder or the address of one; None: the config's, or results/NAME.
    Raises ConfigError, or RunUnreachable for an address.
    """
    config, source = load_config(path)
    if selection.instruments:
        config = with_instruments(config, selection.instruments)
    expansion = expand(config, source, selection)
    require_matches(config, source)
    require_ranks(config, source, selection)
    # Otherwise another sweep would run than the user asked for.
    for name in sorted(expansion.idle):
        remedy = (
            "Leave it out, or set the axis that it depends on, such as timing, device or compile"
        )
        problem = f"--set {name}: has no effect on the selected cells"
        raise ConfigError(problem, REMEDIES_OF_RANKS.get(name, remedy))
    location = out or config.results or Path("results") / config.name
    if not is_address(location):
        require_name(location, "--out")  # the current folder may not be UTF-8 either
    run = open_run(location)
    request = SweepRequest(config, selection, expansion, run, path)
    values = [value for cell in expansion.cells for value in cell.params.non_default.values()]
    if any(":" in str(value) for value in values):  # package.module:Name, or model_args
        require_modules(expansion.cells, request.search_path, source)
    return request


def resolve_again(run: Run) -> SweepRequest:
    """Return the last sweep of a folder as a new request, which measures what it has left.

    Raises RunError if no sweep ran in the folder.
    """
    manifest = run.require().read_manifest()
    require_sweep(manifest, run)
    source = Source(f"{run}/run.json", manifest["config"])
    config = validate_config(manifest["config"], source)
    selection = Selection.from_json(manifest["selection"])
    last = last_sweep(run)
    return SweepRequest(
        config,
        selection,
        expand(config, source, selection),
        run,
        Path(manifest["config_path"]),
        RunOptions.from_json(last.choice),
        ExecutionOptions(skip_predicted_oom=last.skips),
    )
