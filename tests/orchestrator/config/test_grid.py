from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.common.errors import ConfigError
from orchestrator.config.grid import Expansion, expand, require_matches, require_ranks
from orchestrator.config.schema import parse_config
from orchestrator.config.selection import choose_sample, matches, parse_selection
from tasks.spec.cell import Cell
from tasks.spec.registry import make_cell

TEXT = """
name: test
defaults: {device: cpu, batch_size: 2}
grids:
  - task: train_step
    axes: {size: [tiny, mini], context_length: [16, 32], compile: [eager, blocks]}
    fixed: {measured_steps: 3}
    exclude: [{size: mini, context_length: [32, 64]}]
    override: [{when: {size: mini}, set: {measured_steps: 7}}]
    include: [{size: small, context_length: 8}]
"""


def expanded(
    text: str = TEXT, sets: list[str] | None = None, wheres: list[str] | None = None
) -> Expansion:
    config, source = parse_config(text, "test.yaml")
    return expand(config, source, parse_selection(sets or [], wheres or []))


def column(expansion: Expansion, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(cell.params.values()[name] for name in names) for cell in expansion.cells]


def test_axes_fixed_exclude_override_include() -> None:
    assert column(
        expanded(), "size", "context_length", "compile", "measured_steps", "batch_size"
    ) == [
        ("tiny", 16, "eager", 3, 2),
        ("tiny", 16, "blocks", 3, 2),
        ("tiny", 32, "eager", 3, 2),
        ("tiny", 32, "blocks", 3, 2),
        ("mini", 16, "eager", 7, 2),
        ("mini", 16, "blocks", 7, 2),
        ("small", 8, "eager", 3, 2),
    ]


def test_set_narrows_replaces_and_reaches_what_is_included() -> None:
    cells = expanded(sets=["compile=eager", "precision=fp32,bf16"])
    assert {row[0] for row in column(cells, "compile")} == {"eager"}
    assert column(cells, "size", "precision").count(("small", "bf16")) == 1
    assert len(cells.cells) == 2 * (2 + 1 + 1)


def test_a_mapping_may_be_set() -> None:
    cells = expanded(
        "name: a\ngrids: [{task: train_step, fixed: {model: 'a:B'}}]",
        sets=["model_args={n: 1, m: 2},{n: 3}"],
    )
    assert column(cells, "model_args") == [({"n": 1, "m": 2},), ({"n": 3},)]


def test_an_override_sees_the_defaults() -> None:
    text = TEXT.replace("when: {size: mini}", "when: {precision: fp32, size: [tiny, mini]}")
    assert set(column(expanded(text), "measured_steps")) == {(7,), (3,)}


def test_a_value_set_on_the_command_line_wins_over_an_override() -> None:
    cells = expanded(sets=["measured_steps=20,30"])
    assert set(column(cells, "size", "measured_steps")) == {
        (size, n) for size in ("tiny", "mini", "small") for n in (20, 30)
    }
    chain = TEXT.replace(
        "set: {measured_steps: 7}}]",
        "set: {measured_steps: 7}}, {when: {measured_steps: 7}, set: {seed: 1}}]",
    )
    assert set(column(expanded(chain), "size", "seed")) == {("tiny", 0), ("mini", 1), ("small", 0)}
    assert set(column(expanded(chain, sets=["measured_steps=4"]), "seed")) == {(0,)}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "size: mini, context",
            "size: minni, context",
            "test.yaml:8: grids[0].exclude[0].size: 'minni' is not allowed. Did you mean",
        ),
        (
            "[32, 64]",
            '[32, "64"]',
            "test.yaml:8: grids[0].exclude[0].context_length[1]: Input should be a valid integer",
        ),
        ("[32, 64]", "0", "greater than or equal to 1"),
        ("[32, 64]", "null", "valid integer"),
        ("[32, 64]", '"64"', "valid integer (it is '64'). Write it without quotes"),
        ("[32, 64]", "none", "valid integer (it is 'none'). For no value, write null"),
        (
            "[32, 64]",
            "[]",
            "test.yaml:8: grids[0].exclude[0].context_length: an empty list matches nothing",
        ),
        ("[32, 64]", "32, pass: forwrad", "Did you mean 'forward'"),
        ("[32, 64]", "32, half_width: 3.0", "less than 1"),
        ("[32, 64]", "32, compile_mode: defualt", "Did you mean 'default'"),
        ("[32, 64]", "32, model_args: [{a: 1}, 1]", "is not a mapping. Write NAME: value"),
        (
            "when: {size: mini}",
            "when: {size: tinyy}",
            "test.yaml:9: grids[0].override[0].when.size: 'tinyy' is not allowed. Did",
        ),
        (
            "when: {size: mini}",
            'when: {seed: "0"}',
            "test.yaml:9: grids[0].override[0].when.seed: Input should be a valid integer",
        ),
    ],
)
def test_a_clause_that_can_match_nothing(old: str, new: str, expected: str) -> None:
    assert old in TEXT
    with pytest.raises(ConfigError, match=re.escape(expected)):
        expanded(TEXT.replace(old, new))


@pytest.mark.parametrize(
    ("clause", "left"),
    [
        ("size: null", 9),
        ("memory_limit_gib: [null, 8]", 0),
        ("warmup_steps: [null, 5], size: [tiny, mini]", 1),
        ("compile_mode: reduce-overhead", 9),
        ("model_args: [{a: 1}, {}], size: small", 8),
        ("pass: [forward, train_step], size: small", 8),
    ],
)
def test_a_clause_may_ask_for_any_value_of_its_axis(clause: str, left: int) -> None:
    text = TEXT.replace(
        "exclude: [{size: mini, context_length: [32, 64]}]", f"exclude: [{{{clause}}}]"
    )
    if left == 0:
        with pytest.raises(ConfigError, match="Every combination is excluded"):
            expanded(text)
    else:
        assert len(expanded(text).cells) == left


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("[32, 64]", "64", "test.yaml:8: grids[0].exclude[0]"),
        (
            "[32, 64]}",
            "32}, {size: mini, context_length: 32, compile_mode: reduce-overhead}",
            "test.yaml:8: grids[0].exclude[1]",
        ),
        ("when: {size: mini}", "when: {size: xl}", "test.yaml:9: grids[0].override[0].when"),
        (
            "when: {size: mini}",
            "when: {measured_steps: 4}",
            "test.yaml:9: grids[0].override[0].when",
        ),
    ],
)
def test_a_clause_that_matches_no_cell_is_refused(old: str, new: str, place: str) -> None:
    """Its values are such as the axis may have, and no combination here has them."""
    with pytest.raises(ConfigError) as refused:
        require_matches(*parse_config(TEXT.replace(old, new), "test.yaml"))
    assert (
        str(refused.value) == f"{place}: matches no cell of the grid. Correct it, or leave it out"
    )


@pytest.mark.parametrize(
    "text",
    [
        TEXT.replace(
            "[32, 64]}", "[32, 64]}, {size: mini, context_length: 32}"
        ),  # the same once more
        TEXT.replace(
            "{size: mini, context_length: [32, 64]}", "{size: small}"
        ),  # is what is included
        TEXT.replace(
            "measured_steps: 7}}",
            "measured_steps: 7}}, {when: {measured_steps: 7}, set: {seed: 1}}",
        ),  # is overridden
        TEXT.replace(
            "[16, 32]", f"{[*range(100, 9_000)]}, seed: [0, 1, 2]"
        ),  # too many cells, but for --set
        "name: a\ngrids: [{task: train_step, fixed: {seed: 1}, exclude: [{seed: 2}]}]",  # no size, but for --set
    ],
)
def test_a_clause_that_matches_or_may_match_a_cell_is_accepted(text: str) -> None:
    require_matches(*parse_config(text, "test.yaml"))


def test_where_selects_cells_by_values_of_their_axes() -> None:
    assert column(expanded(wheres=["size=mini|small,compile=eager"]), "size") == [
        ("mini",),
        ("small",),
    ]
    assert len(expanded(wheres=["task=train_step"]).cells) == 7


@pytest.mark.parametrize(
    ("sets", "wheres", "message"),
    [
        (
            [],
            ["context_length=2048"],
            "test.yaml: no cell has context_length=2048. The config has 16, 32, 8. To use another"
            " value: --set context_length=2048",
        ),
        (
            [],
            ["context_length=16,size=large|xl"],
            "test.yaml: no cell has size=large|xl. The config has tiny, mini, small. To use another"
            " value: --set size=large,xl",
        ),
        # What `exclude` takes out is not offered.
        (
            [],
            ["size=mini,context_length=32"],
            "test.yaml: no cell meets all conditions of --where. ",
        ),
        (
            ["size=tiny"],
            ["size=mini"],
            "test.yaml: no cell has size=mini. The config has tiny",
        ),
        (
            [],
            ["task=attention"],
            "test.yaml: no cell has task=attention. The config has train_step",
        ),
    ],
)
def test_conditions_that_no_cell_meets_are_refused_with_the_reason(
    sets: list[str], wheres: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        expanded(sets=sets, wheres=wheres)
    text = str(refused.value)
    assert text.startswith(message)
    assert ("--set" in text) == ("--set" in message)


def test_an_excluded_combination_has_no_remedy_in_the_selection() -> None:
    everything = TEXT.replace("{size: mini, context_length: [32, 64]}", "{batch_size: 2}")
    with pytest.raises(ConfigError, match=r"the grid is empty\. Every combination is excluded"):
        expanded(everything, wheres=["size=tiny"])


def test_several_values_of_a_condition_are_joined_by_a_bar() -> None:
    for where, corrected in (
        ("precision=fp32,bf16", "'precision=fp32|bf16'"),
        ("size=tiny,context_length=16,32,64", "'size=tiny,context_length=16|32|64'"),
        ("size=tiny|mini,small", "'size=tiny|mini|small'"),
    ):
        remedy = f"Separate the values of one axis by |: --where {corrected}"
        with pytest.raises(ConfigError) as refused:
            parse_selection([], [where])
        assert (refused.value.message, refused.value.remedy) == (
            f"--where {where}: a comma separates conditions",
            remedy,
        )


@pytest.mark.parametrize(
    ("sets", "wheres", "expected"),
    [
        (["precison=fp32"], [], "Did you mean 'precision'"),
        (["precision=fp23"], [], "Did you mean 'fp32'"),
        ([], ["sise=xl"], "Did you mean 'size'"),
        ([], ["size=tiny|minni"], "--where: size: 'minni' is not allowed. Did you mean 'mini'"),
        ([], ["context_length=16|'32'"], "valid integer"),
        (["precision"], [], "not an assignment"),
        (["precision="], [], "not an assignment"),
        ([], ["=xl"], "not an assignment"),
        (["context_length=many"], [], "valid integer"),
        (["size=[tiny"], [], "--set"),
        (["size=" + "[" * 3000], [], "--set"),
        (["size=tiny", "size=mini"], [], "given twice"),
        ([], ["size=tiny", "size=mini"], "given twice"),
    ],
)
def test_an_invalid_selection_is_refused_with_the_reason(
    sets: list[str], wheres: list[str], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        expanded(sets=sets, wheres=wheres)


def test_a_cell_named_twice_is_one_cell_and_counted() -> None:
    cells = expanded(
        TEXT.replace("[16, 32]", "[16, 16]").replace(
            "[{size: small, context_length: 8}]", "[{size: tiny, context_length: 16}]"
        )
    )
    assert cells.duplicates == 5
    assert len({cell.id for cell in cells.cells}) == len(cells.cells) == 4


def test_labels_tell_cells_apart() -> None:
    expansion = expanded()
    labels = [expansion.label(cell) for cell in expansion.cells]
    assert len(set(labels)) == len(labels)
    assert "device" not in " ".join(labels)


def test_identity_is_of_what_differs_from_the_defaults() -> None:
    plain = expanded("name: a\ngrids: [{task: train_step, fixed: {size: tiny}}]").cells[0]
    spelled = expanded(
        "name: a\ngrids: [{task: train_step, fixed: {size: tiny, precision: fp32, seed: 0}}]"
    ).cells[0]
    other = expanded("name: a\ngrids: [{task: train_step, fixed: {size: tiny, seed: 1}}]").cells[0]
    assert plain.id == spelled.id != other.id


def test_identity_is_stable() -> None:
    """These ids are in people's results folders: a change here orphans them, and needs a new task version."""
    cell = expanded(
        "name: a\ngrids: [{task: train_step, fixed: {size: small, context_length: 128, precision: bf16}}]"
    )
    assert cell.cells[0].id == "75f4eb9110a0"


@given(
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 2)),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 2)),
)
def test_matching_is_containment(values: dict[str, int], condition: dict[str, int]) -> None:
    assert matches(values, condition) == (condition.items() <= values.items())


def test_a_kind_of_gpu_makes_a_cell_of_its_own_but_not_on_the_cpu() -> None:
    kinds = [cell_of(gpu_kind=kind) for kind in ("H100", "A100", None)]
    assert len({cell.id for cell in kinds}) == 3
    assert (
        kinds[2].id == cell_of().id
    )  # what was measured before there was the axis keeps its identity
    assert cell_of(gpu_kind="H100", device="cpu").id == cell_of(device="cpu").id


def cell_of(**params: Any) -> Cell:
    return make_cell("train_step", {"size": "tiny", **params})


def test_a_sample_is_drawn_alike_each_time_and_hardly_changes_with_the_grid() -> None:
    cells = [make_cell("train_step", {"size": "tiny", "seed": seed}) for seed in range(200)]
    sizes = [len(choose_sample(cells[:count], 0.05)) for count in (0, 2, 20, 21, 60, 61, 200)]
    assert sizes == [0, 1, 1, 2, 3, 4, 10]
    drawn = choose_sample(cells, 0.1)
    assert drawn == choose_sample(reversed(cells), 0.1)[::-1]
    assert drawn != choose_sample(cells, 0.1, seed=1)
    assert set(choose_sample(cells[:199], 0.1)) - set(drawn) <= {cells[-1]}
    assert set(choose_sample(cells, 0.05)) < set(drawn)


def test_a_selection_can_ask_for_a_sample_of_what_it_picks() -> None:
    config, source = parse_config(TEXT, "test.yaml")
    everything, half = (
        expand(config, source, parse_selection([], ["size=tiny"], share)).cells
        for share in (None, 0.5)
    )
    assert len(half) == len(everything) / 2
    assert set(half) < set(everything)


PLACES = """
name: test
defaults:
  seed: 0
grids:
  - task: train_step
    axes:
      size: [tiny, mini]
      context_length:
        - 16
        - 32
    fixed:
      device: cpu
      batch_size: 1
    exclude:
      - {size: tiny, context_length: [16, 32]}
    include:
      - size: mini
        context_length: 8
    override:
      - when: {size: tiny}
        set:
          measured_steps: 4
"""


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("seed: 0", "seed: wrong", "defaults.seed"),
        ("[tiny, mini]", "[tiny, wrong]", "grids[0].axes.size[1]"),
        ("- 32", "- wrong", "grids[0].axes.context_length[1]"),
        ("batch_size: 1", "batch_size: wrong", "grids[0].fixed.batch_size"),
        ("[16, 32]", "[16, wrong]", "grids[0].exclude[0].context_length[1]"),
        ("context_length: 8", "context_length: wrong", "grids[0].include[0].context_length"),
        ("measured_steps: 4", "measured_steps: wrong", "grids[0].override[0].set.measured_steps"),
    ],
)
def test_a_wrong_value_is_named_where_it_stands(old: str, new: str, place: str) -> None:
    """Not where its grid begins."""
    text = PLACES.replace(old, new)
    (line,) = (number for number, line in enumerate(text.splitlines(), 1) if "wrong" in line)
    with pytest.raises(ConfigError) as refused:
        expanded(text)
    assert str(refused.value).startswith(f"test.yaml:{line}: {place}: ")


RANKS = """
name: test
instruments: [{instruments}]
env: {{{env}}}
grids:
  - task: train_step
    axes: {{gpus: [1, 2, 4], parallel: [naive, ddp]}}
    fixed: {{size: tiny, {fixed}}}
"""


def test_a_grid_of_strategies_has_one_cell_with_one_gpu() -> None:
    cells = expanded(RANKS.format(instruments="timing", env="", fixed="precision: bf16"))
    assert column(cells, "gpus", "parallel") == [
        (1, "none"), (2, "naive"), (2, "ddp"), (4, "naive"), (4, "ddp")
    ]  # fmt: skip
    assert cells.duplicates == 1


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (
            {"instruments": "memory, nsys"},
            "test.yaml:3: instruments[1]: the instrument nsys can observe only one process. Remove "
            "it, or use --set gpus=1",
        ),
        (
            {"env": "NCCL_ALGO: Ring", "fixed": "nccl_algo: ring"},
            "test.yaml:4: env.NCCL_ALGO: nccl_algo and env both set NCCL's algorithm. Remove one of",
        ),
        (
            {"env": "NCCL_NVLS_ENABLE: '0'", "fixed": "nccl_algo: no_nvls"},
            "test.yaml:4: env.NCCL_NVLS_ENABLE: nccl_algo and env both set NCCL's algorithm. Remove",
        ),
        (
            {"fixed": "batch_size: 6"},
            "test.yaml:6: grids[0]: batch_size 6 is not divisible by 4 GPUs. Use a multiple of 4, or",
        ),
    ],
)
def test_configs_that_several_ranks_cannot_follow_are_refused(
    written: dict[str, str], message: str
) -> None:
    text = RANKS.format(**{"instruments": "timing", "env": "", "fixed": "seed: 0"} | written)
    with pytest.raises(ConfigError) as refused:
        expanded(text)
    assert str(refused.value).startswith(message)


def test_one_rank_has_all_instruments_and_variables() -> None:
    text = RANKS.format(instruments="memory, nsys", env="NCCL_ALGO: Ring", fixed="nccl_algo: ring")
    assert len(expanded(text, ["gpus=1"]).cells) == 1


@pytest.mark.parametrize(
    ("fixed", "sets", "message"),
    [
        (
            "processes: 2",
            ["device=cuda"],
            "processes: has no effect on the cells of this grid. On a",
        ),
        (
            "parallel: ddp",
            [],
            "parallel: has no effect on the cells of this grid. It needs several",
        ),
        ("gpus: 2", [], "gpus: has no effect on the cells of this grid. On the CPU, processes"),
    ],
)
def test_ranks_that_a_grid_asks_for_in_vain_are_refused(
    fixed: str, sets: list[str], message: str
) -> None:
    """Its cells would measure a single process."""
    text = TEXT.replace("fixed: {", f"fixed: {{{fixed}, ")
    config, source = parse_config(text, "test.yaml")
    with pytest.raises(ConfigError) as refused:
        require_ranks(config, source, parse_selection(sets, []))
    assert str(refused.value).startswith(f"test.yaml:7: grids[0].fixed.{message}")
    assert expanded(text, sets).cells  # results of an older program stay readable


def test_a_grid_of_a_strategy_may_be_set_to_one_rank() -> None:
    config, source = parse_config(TEXT.replace("fixed: {", "fixed: {parallel: ddp, "), "test.yaml")
    require_ranks(config, source, parse_selection(["processes=1"], []))
    require_ranks(config, source, parse_selection(["parallel=none"], []))
