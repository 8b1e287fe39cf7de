"""Names of models that cannot be imported are refused before a cell runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.common.errors import ConfigError
from orchestrator.planning.named_modules import _problem
from orchestrator.planning.request import SweepRequest
from tests.support.fake_sweep import request_for

CONFIG = """\
name: own
grids:
  - task: train_step
    fixed: {{device: cpu, context_length: 16}}
    axes:
      model: ["{}"]
"""


@pytest.fixture
def request_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_config: Callable[..., Path]
) -> Callable[[str], SweepRequest]:
    """Return a function that requests a cell of a model, from a folder with own.py and pkg/."""
    (tmp_path / "own.py").write_text(
        "from torch.nn import Module as Base\nclass Transformer(Base): ...\n"
    )
    (tmp_path / "lazy.py").write_text("def __getattr__(name): return print\n")
    (tmp_path / "broken.py").write_text("import torch\nclass (\n")
    (tmp_path / "needs.py").write_text("import not_on_this_machine\nclass Model: ...\n")
    (tmp_path / "two-words.py").write_text("class Model: ...\n")
    (tmp_path / "tests.py").write_text("class Model: ...\n")  # the clone has such a package
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("from .gpt import *\n")
    (tmp_path / "pkg" / "gpt.py").write_text("def make(width=8): ...\n")
    (tmp_path / "space").mkdir()
    monkeypatch.chdir(tmp_path)
    return lambda model: request_for(write_config(CONFIG.format(model)), out=tmp_path / "run")


@pytest.mark.parametrize(
    "model",
    [
        "own:Transformer",
        "own:Base",
        "lazy:Anything",
        "needs:Model",
        "pkg:make",
        "pkg.gpt:make",
        "space.x:Y",
        "two-words:Model",
        "tests:Model",
        "hf:gpt2",
    ],
)
def test_a_model_that_may_exist_is_accepted(
    model: str, request_of: Callable[[str], SweepRequest]
) -> None:
    assert request_of(model).expansion.cells
    assert not {"own", "lazy", "broken", "pkg", "space"} & sys.modules.keys()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nowhere.gpt:GPT", "there is no module 'nowhere'. Install its package, or put its file"),
        ("pkg.missing:make", "there is no module 'pkg.missing'. Install"),
        ("own.deeper:GPT", "there is no module 'own.deeper'. Install"),
        ("broken:GPT", "broken.py:2: SyntaxError: invalid syntax. Correct this line"),
        ("own:Transfomer", "own.py has no Transfomer. Did you mean 'Transformer'?"),
        ("pkg.gpt:zzz", "gpt.py has no zzz. Name a class or a function of it"),
        ("three-words:Model", "there is no module 'three-words'. Install"),
        ("two-words:Mode l", "two-words.py has no Mode l. Did you mean 'Model'?"),
        ("no\\nwhere:GPT", "there is no module 'no\\nwhere'. Install"),
        (".own:Transformer", "there is no module '.own'. Install"),
        ("pkg..gpt:make", "there is no module 'pkg..gpt'. Install"),
        (
            "own.py:Transformer",
            "'own.py' is a path, not the name of a module. Write own:Transformer",
        ),
        (
            "../pkg/gpt.py:make",
            "'../pkg/gpt.py' is a path, not the name of a module. Write gpt:make",
        ),
        ("pkg/gpt:make", "'pkg/gpt' is a path, not the name of a module. Write gpt:make, and put"),
    ],
)
def test_a_model_that_does_not_exist_is_refused(
    model: str, message: str, request_of: Callable[[str], SweepRequest], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        request_of(model)
    assert message in str(refused.value)
    assert ":6: grids[0].axes.model[0]: model" in str(refused.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("package", "remedy"),
    [
        ("bitsandbytes", "Run pip install bitsandbytes. Its optimizers run on an NVIDIA GPU only"),
        ("torchao", "Run pip install torchao"),
    ],
)
def test_a_package_of_optimizers_is_installed_by_one_command(
    package: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = _problem(f"{package}.optim:AdamW8bit", [])
    assert found == (f"there is no module '{package}'", remedy)


ARGUMENTS = """\
import functools
from torch import nn

class Plain(nn.Module):
    def __init__(self, n_layer, /, n_embd=64, *, dropout=0.0): ...
class Open(nn.Module):
    def __init__(self, **kwargs): ...
class Inherited(Open): ...
class WithMeta(nn.Module, metaclass=type):
    def __init__(self): ...
def make(n_layer=2): ...
@functools.cache
def decorated(): ...
def twice(): ...
if True:
    def twice(n_layer): ...
def bound(): ...
bound = Plain
"""


@pytest.mark.parametrize(
    ("model", "key", "message"),
    [
        ("args:Plain", "n_emb", "args:Plain takes no argument 'n_emb'. Did you mean 'n_embd'?"),
        ("args:make", "depth", "args:make takes no argument 'depth'. Allowed: n_layer"),
        ("args:Plain", "dropout", ""),
        ("args:Plain", "n_layer", ""),
        *((f"args:{name}", "n_emb", "") for name in ("Open", "Inherited", "WithMeta")),
        *((f"args:{name}", "n_layer", "") for name in ("make", "decorated", "bound", "twice")),
    ],
)
@pytest.mark.parametrize(
    "form", ["fixed: {{model_args: {{{}: 1}}}}", "axes: {{model_args.{}: [1]}}"]
)
def test_an_argument_that_a_model_does_not_take_is_refused_before_a_cell_runs(
    model: str, key: str, message: str, form: str, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "args.py").write_text(ARGUMENTS)
    lines = ["name: own", f"defaults: {{device: cpu, model: '{model}'}}", "grids:"]
    config = write_config("\n".join([*lines, "  - task: train_step", "    " + form.format(key)]))
    if not message:
        assert request_for(config, out=tmp_path / "run").expansion.cells
        return
    with pytest.raises(ConfigError) as refused:
        request_for(config, out=tmp_path / "run")
    assert f":5: grids[0].{form[:5].rstrip(':{')}" in str(refused.value)
    assert str(refused.value).endswith(message)
    assert not (tmp_path / "run").exists()
