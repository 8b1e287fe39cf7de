from __future__ import annotations

from pathlib import Path

from tasks.spec.source_digest import source_digest


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


def test_what_is_not_there_or_is_installed_is_told_otherwise(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "one.py").write_text("")
    assert source_digest("nowhere:Model", [str(tmp_path)]) is None
    assert source_digest("one:Model", [str(tmp_path / "site-packages")]) is None
