"""Every page is plain English, its links lead somewhere, and what it names exists."""

from __future__ import annotations

import re
import shlex
from typing import Any

import click
import pytest

from orchestrator.analysis.gate_policy import PolicyFile
from orchestrator.cli.main import main
from orchestrator.config.grid import expand
from orchestrator.config.schema import load_config
from orchestrator.config.selection import Selection
from orchestrator.config.yaml_source import load_yaml, plain
from orchestrator.report.tables.registry import TABLES
from tests.conftest import ROOT
from tests.docs.pages import TEXTS, headings, sweep_commands
from tests.support.plain_words import DIALECT_WORD

# Options of other programs that the pages name: sbatch, ray, pip, docker, pytest.
OTHER_OPTIONS = {"--nproc-per-node", 
    "--nodes", "--gpus-per-node", "--time", "--working-dir", "--address", "--head", "--help",
    "--version", "--init", "--fresh", "--no-deps", "--wheel-dir", "--trace", "--type",
    "--cuda-graph-trace",
}  # fmt: skip
LONGEST_SENTENCE = 30  # words
GENERATED = {"docs/columns.md", *(page for page in TEXTS if page.startswith("docs/reference/"))}


def test_every_link_leads_to_a_page_and_a_heading() -> None:
    wrong = []
    for page, text in TEXTS.items():
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if link.startswith("https://"):
                continue
            file, _, heading = link.partition("#")
            path = (ROOT / page).parent / file if file else ROOT / page
            if not path.exists() or (heading and heading not in headings(path)):
                wrong.append(f"{page}: {link}")
    assert not wrong


def test_every_option_that_a_page_names_exists() -> None:
    parameters = [parameter for command in main.commands.values() for parameter in command.params]
    known = {option for parameter in parameters for option in parameter.opts}
    for page, text in TEXTS.items():
        if page == "CHANGELOG.md":  # names removed options
            continue
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
        assert named <= known | OTHER_OPTIONS, page


def test_every_command_has_an_example_in_a_page() -> None:
    commands = {line.split()[1] for page in TEXTS for line in sweep_commands(page)}
    listed = {name for name, command in main.commands.items() if not command.hidden}
    assert listed <= commands


@pytest.mark.parametrize("page", TEXTS)
def test_every_command_in_a_page_parses(page: str) -> None:
    for line in sweep_commands(page):
        words = shlex.split(line.split(" > ")[0])[1:]
        with click.Context(main) as context:
            name, command, rest = main.resolve_command(context, words)
            assert command is not None
            command.make_context(str(name), rest, parent=context)


def test_the_policy_in_the_guide_is_valid() -> None:
    page = "docs/how-to/use-in-ci.md"
    (block,) = re.findall(r"```yaml\n(gate:\n.*?)```", TEXTS[page], re.DOTALL)
    policy = PolicyFile.model_validate(plain(load_yaml(block, page))).gate
    assert [bool(cell.accept) for cell in policy.cells] == [False, True]


def test_the_workflow_of_this_repository_runs_commands_that_exist() -> None:
    """They are those of the guide, with the config and the code of this repository."""
    path = ROOT / ".github" / "workflows" / "memory-gate.yml"
    workflow: Any = plain(load_yaml(path.read_text(), path.name))
    runs = [step["run"] for step in workflow["jobs"]["memory"]["steps"] if "run" in step]
    commands = [re.sub(r"^python -m orchestrator|^sweep", "", run) for run in runs[1:]]
    assert len(commands) == 3
    for line in commands:
        with click.Context(main) as context:
            name, command, rest = main.resolve_command(context, shlex.split(line.split(" > ")[0]))
            assert command is not None
            command.make_context(str(name), rest, parent=context)
    config, source = load_config(ROOT / "configs" / "memory-gate.yaml")
    cells = expand(config, source, Selection()).cells
    assert len(cells) == 40
    assert len({cell.params.values()["model"] for cell in cells} - {None}) == 3


def test_every_help_text_has_an_example_that_parses() -> None:
    for name, command in main.commands.items():
        example = re.search(r"Example: sweep (.+)", command.help or "", re.DOTALL)
        assert example, name
        words = example[1].split(" > ")[0].split()
        with click.Context(main) as context:
            _, found, rest = main.resolve_command(context, words)
            assert found is command
            command.make_context(name, rest, parent=context)


def test_the_readme_is_short() -> None:
    assert len(TEXTS["README.md"].splitlines()) <= 150


def test_the_pages_are_in_plain_words() -> None:
    written = " ".join(text for page, text in TEXTS.items() if page not in GENERATED)
    words = prose(written).lower()
    found = DIALECT_WORD.findall(words)
    assert len(found) <= len(words.split()) / 1000, found


def prose(text: str) -> str:
    """Return a page without its code blocks and without the targets of its links."""
    return re.sub(r"```.*?```|(?<=\])\([^)]*\)", "", text, flags=re.DOTALL)


def long_sentences(text: str) -> list[str]:
    """Return the sentences with too many words. A table cell and a list item end a sentence."""
    parts = re.split(r"\n\s*\n|\n(?=[-#|] ?|\d+\. )|\|", prose(text))
    sentences = [part for text in parts for part in re.split(r"(?<=[.:;?!])\s+", text)]
    return [part for part in sentences if len(part.split()) > LONGEST_SENTENCE]


def test_no_page_or_caption_has_a_long_sentence() -> None:
    texts = {page: text for page, text in TEXTS.items() if page not in GENERATED}
    texts |= {table.name: table.read for table in TABLES}
    found = {name: long_sentences(text) for name, text in texts.items()}
    assert not {name: sentences for name, sentences in found.items() if sentences}


def test_the_page_for_the_course_names_tables_that_exist() -> None:
    rows = re.findall(
        r"^\|.*\| `sweep run .*` \| (.*) \|$", TEXTS["docs/how-to/hand-in-cs336.md"], re.M
    )
    problems = re.findall(
        r"^\| (`\w+`.*?) \| (.*?) \| .* \|$", TEXTS["docs/how-to/hand-in-cs336.md"], re.M
    )
    assert len(re.findall("`", "".join(named for named, _ in problems))) == 2 * 10
    rows += [tables for _, tables in problems]
    names = {name for row in rows for name in re.findall("`([^`]+)`", row)}
    assert len(rows) == 10 + 8
    assert names <= {table.name for table in TABLES}


@pytest.mark.parametrize("page", TEXTS)
def test_every_config_in_a_page_is_valid(page: str) -> None:
    from orchestrator.config.grid import expand
    from orchestrator.config.schema import parse_config
    from orchestrator.config.selection import Selection

    # Policies begin with `gate`, workflows with `on`.
    for text in re.findall(r"```yaml\n(?!gate:|on:)(.*?)```", TEXTS[page], re.DOTALL):
        assert expand(*parse_config(text, page), Selection({}, {})).cells
