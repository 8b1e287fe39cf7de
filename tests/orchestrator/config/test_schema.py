from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

from orchestrator.common.errors import ConfigError
from orchestrator.config.grid import expand
from orchestrator.config.schema import (
    LONGEST_VARIABLE,
    json_schema,
    load_config,
    parse_config,
    validate_config,
)
from orchestrator.config.selection import Selection, parse_selection
from orchestrator.config.yaml_source import Source
from tests.conftest import ROOT
from tests.fuzz import mutants, outcome_of_config

NOTHING = Selection({}, {})


@cache
def validator() -> Any:
    """Return a validator of the schema, which is checked and compiled once."""
    jsonschema.Draft202012Validator.check_schema(json_schema())
    return jsonschema.Draft202012Validator(json_schema())


GOOD = """
name: test
grids:
  - task: train_step
    axes:
      size: [tiny]
      precision: [fp32, bf16]
"""


def complaint(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        expand(*parse_config(text, "my.yaml"), NOTHING)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_valid_config_expands_to_its_cells() -> None:
    config, source = parse_config(GOOD, "my.yaml")
    assert [
        cell.params.values()["precision"] for cell in expand(config, source, NOTHING).cells
    ] == ["fp32", "bf16"]


@pytest.mark.parametrize(
    ("old", "new", "line", "expected"),
    [
        ("precision:", "precison:", 7, "Did you mean 'precision'?"),
        ("[tiny]", "[tinny]", 6, "Did you mean 'tiny'?"),
        ("[fp32, bf16]", "[fp32, bf61]", 7, "Did you mean 'bf16'?"),
        ("task: train_step", "task: trian_step", 4, "Did you mean 'train_step'?"),
        ("axes:", "axis:", 5, "Did you mean 'axes'?"),
        ("name: test", "nmae: test", 2, ""),
        ("[tiny]", "[]", 6, "at least 1 item"),
        ("[fp32, bf16]", "[no, off]", 7, "'no' is not allowed"),
        ("name: test", "name: ../up", 2, "cannot name a folder. Use letters, digits and"),
    ],
)
def test_each_error_names_its_line_and_the_nearest_word(
    old: str, new: str, line: int, expected: str
) -> None:
    message = complaint(GOOD.replace(old, new))
    assert message.startswith(f"my.yaml:{line}") or line == 2
    assert expected in message


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("    fixed: {d_model: 8}", "exactly one way"),
        ("    fixed: {context_length: '128'}", "valid integer"),
        ("    fixed: {context_length: 0}", "greater than or equal to 1"),
        ("    fixed: {year: 2026, model: x}", "exactly one way"),
        ("    exclude: [{precison: fp32}]", "Did you mean 'precision'?"),
        ("    override: [{when: {size: tiny}, set: {batchsize: 2}}]", "Did you mean 'batch_size'?"),
        ("    override: [{wehn: {}, set: {}}]", "Did you mean 'when'?"),
        ("    include: [{contxt_length: 8}]", "Did you mean 'context_length'?"),
        ("    exclude: [{size: tiny}]", "Every combination is excluded"),
        ("defaults: {devise: cpu}", "Did you mean 'device'?"),
        ("instruments: [timming]", "Did you mean 'timing'?"),
        ("limits: 5", "my.yaml:8: limits: is not a mapping. Write NAME: value"),
        ("limits: {timeout: 3}", "Did you mean 'timeout_s'?"),
        ("limits: {timeout_s: -1}", "greater than 0"),
        ("limits: {timeout_s: 1e300}", "less than or equal to 100000000"),
        ("limits: {host_memory_gib: .inf}", "inf is not finite"),
        ("limits: {host_memory_gib: 1e300}", "less than or equal to 1000000"),
        (
            "    fixed: {memory_limit_gib: 1e300}",
            "my.yaml:8: grids[0].fixed.memory_limit_gib: Input should be less than or equal to",
        ),
        (
            "    fixed: {seed: 99999999999999999999}",
            "my.yaml:8: grids[0].fixed.seed: integers must fit in 63 bits",
        ),
        (
            "    exclude: [{seed: 99999999999999999999}]",
            "my.yaml:8: grids[0].exclude[0].seed: integers must fit in 63 bits",
        ),
        ("env: {A: 1}", "valid string"),
        ("env: {A: x, '': x}", "'' cannot name an environment variable"),
        (
            "env:\n  A: x\n  A=B: x",
            "my.yaml:10: env.A=B: 'A=B' cannot name an environment variable",
        ),
        (
            'env: {"A\\0": x}',
            r"my.yaml:8: env.'A\x00': 'A\x00' cannot name an environment variable",
        ),
        ('env: {A: "x\\0y"}', "my.yaml:8: env.A: cannot be the value of an environment variable"),
        ('env: {A: "\\ud800"}', "my.yaml:8: env.A: a text has half of a surrogate pair"),
        *((f'results: "{name}"', "my.yaml:8: results: ") for name in ("", " ", "a\\0b", "\\ud800")),
        ('"lim\\nits": {}', "Did you mean 'limits'?"),
    ],
)
def test_wrong_values_in_a_config_are_explained(more: str, expected: str) -> None:
    assert expected in complaint(GOOD + more)


@pytest.mark.parametrize("name", ["PYTHONHOME", "LD_TRACE_LOADED_OBJECTS"])
def test_a_variable_with_which_python_does_not_start_is_refused(name: str) -> None:
    started = subprocess.run(
        [sys.executable, "-c", "print('started')"],
        env={**os.environ, name: "/nowhere"},
        capture_output=True,
        text=True,
    )
    assert "started" not in started.stdout
    text = GOOD + f"env: {{OMP_NUM_THREADS: '1', {name}: /nowhere}}"
    assert complaint(text).startswith(f"my.yaml:8: env.{name}: Python does not start with it")


def test_the_gpus_of_a_cell_are_no_variable_of_a_config() -> None:
    """Each cell would be measured on them, also those that run at the same time."""
    text = GOOD + "env: {CUDA_VISIBLE_DEVICES: '1'}"
    assert complaint(text).startswith(
        "my.yaml:8: env.CUDA_VISIBLE_DEVICES: the scheduler gives each cell its GPU. Set it for the"
    )


def test_any_text_may_be_a_value_in_the_environment() -> None:
    config, _ = parse_config(GOOD + 'env: {A: "", B: "a=b\\nc é"}', "my.yaml")
    assert config.env == {"A": "", "B": "a=b\nc é"}


def test_size_of_another_year() -> None:
    assert "10B is not of 2025" in complaint(GOOD.replace("tiny", "10B"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: a\ngrids:\n\t- task: x", "my.yaml:3: not valid YAML"),
        ("name: a\nname: b\n", "duplicate key"),
        (
            "name: a\ngrids: [{task: train_step, fixed: {model_args: {a: !foo bar}}}]",
            "without a tag",
        ),
        ("- a\n- b\n", "not a mapping"),
        ("", "not a mapping"),
        ("name: !!python/object/apply:os.system ['true']\ngrids: []", ""),
        ("name: [unclosed", "my.yaml:"),
        ("name: \x00", "my.yaml"),
    ],
)
def test_a_text_that_is_no_valid_config_is_refused_with_the_reason(
    text: str, expected: str
) -> None:
    assert expected in complaint(text)


def test_a_tab_has_its_remedy() -> None:
    assert "Indent with spaces" in complaint("name: a\ngrids:\n\t- task: x")


def test_an_alias_bomb_is_refused_without_expanding_it() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    assert "aliases unfold" in complaint("\n".join(lines))


def test_an_alias_bomb_with_a_duplicate_key_is_refused_without_expansion() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    assert "aliases unfold" in complaint("\n".join([*lines, lines[-1]]))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Try --mutants configs, a thousand of each seed; the default tier has the first seed."""
    if "mutant_seed" in metafunc.fixturenames:
        times = metafunc.config.getoption("--mutants")
        seeds = range(1, times // 1000)
        others = [pytest.param(seed, 1000, marks=pytest.mark.fuzz) for seed in seeds]
        batches = [(0, min(times, 1000)), *others]
        metafunc.parametrize(("mutant_seed", "mutant_count"), batches)


def test_a_mutated_config_is_refused_in_one_line_or_expands(
    mutant_seed: int, mutant_count: int
) -> None:
    ended = Counter(map(outcome_of_config, mutants(mutant_count, mutant_seed)))
    assert set(ended) == {"refused", "expanded"}, ended


def test_a_grid_of_a_thousand_million_cells_is_refused_before_it_is_multiplied_out() -> None:
    axes = "".join(
        f"      {axis}: {list(range(1, 1001))}\n"
        for axis in ("seed", "batch_size", "context_length")
    )
    assert "more than 100,000 combinations" in complaint(GOOD + axes)
    config, source = parse_config(GOOD + axes, "my.yaml")
    few = parse_selection(["seed=1", "batch_size=1", "context_length=1,2"], [])
    assert len(expand(config, source, few).cells) == 4


def test_a_config_that_contains_itself_is_refused() -> None:
    assert "my.yaml" in complaint("name: a\ngrids: &g [*g]")
    assert "my.yaml" in complaint(
        "name: a\ngrids: &g [{task: train_step, fixed: {model_args: *g}}]"
    )


def test_an_honest_alias_is_welcome() -> None:
    config, source = parse_config(
        GOOD.replace("[tiny]", "&s [tiny]") + "  - {task: train_step, axes: {size: *s}}", "x"
    )
    assert expand(config, source, NOTHING).duplicates == 1


def test_numbers_are_those_of_yaml_1_2() -> None:
    config, _ = parse_config(GOOD + "limits: {timeout_s: 1e2}", "x")
    assert config.limits.timeout_s == 100


def test_unreadable_file(tmp_path: Path, write_config: Callable[..., Path]) -> None:
    write_config(GOOD, "demo.yaml")
    with pytest.raises(ConfigError, match=r"demmo.yaml: cannot be read.*Did you mean"):
        load_config(tmp_path / "demmo.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9\xff")
    with pytest.raises(
        ConfigError,
        match=r"latin.yaml: cannot be read: byte 6 is not UTF-8. Save it as UTF-8$",
    ):
        load_config(tmp_path / "latin.yaml")
    with pytest.raises(
        ConfigError, match=r"Is a directory. Name a YAML file, such as configs/demo.yaml$"
    ):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be read: File name too long$"):
        load_config(tmp_path / ("x" * 300))


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name
)
def test_schema_accepts_every_config_that_is_shipped(path: Path) -> None:
    document = json.loads(json.dumps(YAML(typ="safe", pure=True).load(path)))
    validator().validate(document)
    config, source = load_config(path)
    assert expand(config, source, NOTHING).cells


def test_schema_refuses_what_the_loader_refuses() -> None:
    for wrong in (
        GOOD.replace("precision", "precison"),
        GOOD.replace("[tiny]", "[tinny]"),
        GOOD + "limit: {}",
    ):
        document = YAML(typ="safe", pure=True).load(wrong)
        with pytest.raises(jsonschema.ValidationError):
            validator().validate(document)


def test_schema_accepts_zipped_axes_keys_and_single_values() -> None:
    text = (
        GOOD
        + """
      batch_size: 2
      model_args.layers: [6, 12]
    zip: [{seed: [1, 2], measured_steps: [3, 4], optimizer_args.momentum: [0, 0.9]}]
"""
    )
    document = YAML(typ="safe", pure=True).load(text)
    validator().validate(document)
    document["grids"][0]["zip"][0]["seed"] = 1
    with pytest.raises(jsonschema.ValidationError):
        validator().validate(document)


def test_schema_is_printed(sweep: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    assert json.loads(sweep("schema").stdout)["title"] == "SweepConfig"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "name: a\ngrids:\n- task: matmul\n  axes: {seed: [1, 2]}\n  fixed:\n    device: cpu\n    seed: 3",
            "c.yaml:7: grids[0].fixed.seed: is also among the axes of the grid. Leave one of them out",
        ),
        (
            "name: a\ninstruments: []\ngrids: [{task: matmul}]",
            "c.yaml:2: instruments: is empty: nothing would be measured. Leave it out, or write [timing]",
        ),
    ],
)
def test_settings_without_effect_are_refused_in_a_config_but_not_in_a_run(
    text: str, expected: str
) -> None:
    """Not where it is read of a run that an earlier program let have it."""
    with pytest.raises(ConfigError) as refused:
        parse_config(text, "c.yaml")
    assert str(refused.value) == expected
    validate_config(YAML(typ="safe", pure=True).load(text), Source("run.json", None))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a limit of Linux")
def test_a_variable_that_no_process_accepts_is_refused_with_its_line() -> None:
    value = "x" * (LONGEST_VARIABLE - 2)
    for text, is_accepted in ((value, True), (f"{value}x", False)):
        environment = {**os.environ, "A": text}
        with nullcontext() if is_accepted else pytest.raises(OSError, match="too long"):
            subprocess.run(["true"], env=environment, check=True)
    parse_config(f"{GOOD}env: {{A: {value}}}", "c.yaml")
    with pytest.raises(ConfigError) as refused:
        parse_config(f"{GOOD}env: {{B: b, A: {value}x}}", "c.yaml")
    assert str(refused.value) == (
        "c.yaml:8: env.A: has 131,072 bytes, but a process accepts at most 131,071 bytes per "
        "variable. Put the value into a file"
    )


def test_variables_that_are_too_large_together_are_refused() -> None:
    allowed = os.sysconf("SC_ARG_MAX") // 2
    value = "x" * 100_000
    names = ", ".join(f"A{number}: {value}" for number in range(allowed // len(value) + 1))
    with pytest.raises(ConfigError, match="together with the environment of this process"):
        parse_config(f"{GOOD}env: {{{names}}}", "c.yaml")


def test_a_config_may_come_through_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("name: x\ngrids: [{task: matmul}]\n",))
    writer.start()
    config, _ = load_config(pipe)
    writer.join()
    assert config.name == "x"


def test_a_pipe_that_nobody_writes_to_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.config.schema._PIPE_S", 0.05)
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigError, match=r"cannot be read: nothing was written to it for 0\.05 s"):
        load_config(tmp_path / "pipe.yaml")


def test_an_endless_device_is_no_config() -> None:
    with pytest.raises(ConfigError, match="/dev/zero: larger than 400000 bytes"):
        load_config(Path("/dev/zero"))
