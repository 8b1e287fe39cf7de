"""A command line or a results folder, resolved to the cells that a sweep measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchestrator.config.grid import Expansion, expand, require_effect, require_matches
from orchestrator.config.schema import SweepConfig, load_config, validate_config, with_instruments
from orchestrator.config.selection import Selection, parse_selection
from orchestrator.config.yaml_source import Source
from orchestrator.store.manifest import build_manifest, require_sweep
from orchestrator.store.open import open_run
from orchestrator.store.remote.address import RunLocation
from orchestrator.store.run import Run
from tasks.spec.attempt import Settings, StartMethod
from tasks.spec.parameters import default_values
from tasks.spec.registry import all_tasks


@dataclass(frozen=True)
class SweepRequest:
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

    def manifest(
        self, fingerprints: Mapping[str, Sequence[Mapping[str, Any]]], invocation: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the run's manifest with this sweep and one more invocation."""
        sweep = {
            "config_path": str(self.config_path),
            "config": self.config.model_dump(mode="json"),
            "selection": asdict(self.selection),
            "asked": len(self.expansion.cells),
        }
        before = self.run.read_manifest()
        # A search for limits visits cells of its own; the folder's sweep stays as it was.
        if self.searching and "config" in before:
            sweep = {name: before[name] for name in sweep if name in before}
        sweep |= {"name": self.config.name, "fingerprints": fingerprints}
        tasks = {grid.task: all_tasks()[grid.task].params for grid in self.config.grids}
        defaults = {name: default_values(params) for name, params in tasks.items()}
        return build_manifest(before, sweep, defaults, invocation)


def resolve(
    path: Path,
    sets: Sequence[str],
    wheres: Sequence[str],
    out: RunLocation | None,
    sample: float | None = None,
    instruments: Sequence[str] = (),
) -> SweepRequest:
    """out: a folder, or the address of one elsewhere. Raises ConfigError, or RunUnreachable."""
    config, source = load_config(path)
    config = with_instruments(config, instruments)
    selection = parse_selection(sets, wheres, sample, instruments)
    expansion = expand(config, source, selection)
    require_matches(config, source)
    require_effect(expansion)
    run = open_run(out or config.results or Path("results") / config.name)
    return SweepRequest(config, selection, expansion, source, run, path)


def resolve_again(run: Run) -> SweepRequest:
    """The request that a run folder was last written for. Raises RunError where no sweep ran in it."""
    manifest = run.require().read_manifest()
    require_sweep(manifest, run)
    source = Source(f"{run}/run.json", manifest["config"])
    config = validate_config(manifest["config"], source)
    selection = Selection.from_json(manifest["selection"])
    return SweepRequest(
        config,
        selection,
        expand(config, source, selection),
        source,
        run,
        Path(manifest["config_path"]),
    )


def make_settings(request: SweepRequest, start_method: StartMethod | None) -> Settings:
    config = request.config
    return Settings(
        timeout_s=config.limits.timeout_s,
        instruments=tuple(config.instruments),
        env=dict(config.env),
        host_memory_gib=config.limits.host_memory_gib,
        import_paths=request.import_paths,
        start_method=start_method,
    )
