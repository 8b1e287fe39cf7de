from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tasks.spec.source_digest import find_model_config, shadowed_spec, source_digest


def test_the_source_of_a_model_is_told_by_what_it_says(tmp_path: Path) -> None:
    """All of its package, wherever it lies; nothing is imported."""
    (tmp_path / "one.py").write_text("raise SystemExit")
    package = tmp_path / "pack" / "within"
    package.mkdir(parents=True)
    (tmp_path / "pack" / "__init__.py").write_text("raise SystemExit")
    (package / "gpt.py").write_text("a = 1")
    paths = [str(tmp_path)]
    before = source_digest("one:Model", paths), source_digest("pack.within.gpt:Model", paths)
    assert all(before)
    assert before == (
        source_digest("one:Model", paths),
        source_digest("pack.within.gpt:Model", paths),
    )
    (package / "layers.py").write_text("b = 2")
    assert source_digest("one:Model", paths) == before[0]
    assert source_digest("pack.within.gpt:Model", paths) != before[1]


def test_missing_and_installed_modules_have_no_source_digest(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "one.py").write_text("")
    assert source_digest("nowhere:Model", [str(tmp_path)]) is None
    assert source_digest("one:Model", [str(tmp_path / "site-packages")]) is None


def test_modules_that_a_model_imports_belong_to_its_source(tmp_path: Path) -> None:
    """Directly, through another module, in a function, and by a name in a text."""
    (tmp_path / "gpt.py").write_text(
        "import layers, json, torch\nfrom pack.deep import a\n"
        "import importlib\nimportlib.import_module('late.inner')\n"
    )
    (tmp_path / "layers.py").write_text("def make():\n    from lazy import other\n")
    for name in ("lazy", "late", "unused", "model"):
        (tmp_path / f"{name}.py").write_text("import gpt\n")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "deep.py").write_text("not Python")
    covered = ("gpt.py", "layers.py", "lazy.py", "late.py", "pack/deep.py")
    for name in (*covered, "unused.py", "model.py", "data.yaml"):
        before = source_digest("gpt:GPT", [str(tmp_path)])
        with (tmp_path / name).open("a") as file:
            file.write("# changed\n")
        assert (source_digest("gpt:GPT", [str(tmp_path)]) != before) is (name in covered), name


def test_helpers_that_are_installed_do_not_count(tmp_path: Path) -> None:
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (tmp_path / "gpt.py").write_text("import helper")
    (installed / "helper.py").write_text("")
    paths = [str(tmp_path), str(installed)]
    before = source_digest("gpt:GPT", paths)
    (installed / "helper.py").write_text("a = 1")
    assert source_digest("gpt:GPT", paths) == before


@pytest.mark.parametrize("name", ["model", "tasks", "orchestrator", "code"])
def test_a_file_with_a_name_of_this_program_or_of_python_is_found(
    name: str, tmp_path: Path
) -> None:
    paths = [*sys.path, str(tmp_path)]
    assert shadowed_spec(name, paths) is None
    (tmp_path / f"{name}.py").write_text("a = 1")
    spec = shadowed_spec(name, paths)
    assert spec is not None
    assert spec.origin == str(tmp_path / f"{name}.py")
    before = source_digest(f"{name}:GPT", paths)
    (tmp_path / f"{name}.py").write_text("a = 2")
    assert source_digest(f"{name}:GPT", paths) not in (None, before)


def test_the_source_of_a_named_model_is_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder, or else in the cache of the hub's client; nothing is downloaded."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    paths = [str(tmp_path / "sweep")]
    assert source_digest("hf:org/net", paths) is None
    cached = tmp_path / "home" / "hub" / "models--org--net"
    snapshot = cached / "snapshots" / "abc" / "config.json"
    for file, text in ((cached / "refs" / "main", "abc\n"), (snapshot, "{}")):
        file.parent.mkdir(parents=True)
        file.write_text(text)
    assert find_model_config("org/net", paths) == snapshot
    from_hub = source_digest("hf:org/net", paths)
    own = tmp_path / "sweep" / "org" / "net" / "config.json"
    own.parent.mkdir(parents=True)
    own.write_text("{}")
    assert find_model_config("./org/net", paths) == own
    assert source_digest("hf:org/net", paths) == from_hub
    own.write_text('{"hidden_size": 8}')
    assert source_digest("hf:org/net", paths) not in (None, from_hub)
