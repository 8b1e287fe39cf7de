"""What is of somebody's machine goes, what a reader needs stays."""

from __future__ import annotations

import hashlib
import json

import pandas as pd
import pytest

from orchestrator.publication.redaction import Redaction

UUID = "ecfaa693-9706-3340-2855-767684b9d5d1"
GPU = f"GPU {hashlib.sha256(UUID.encode()).hexdigest()[:8]}"


@pytest.fixture
def redaction() -> Redaction:
    """Of two hosts, of which the second was there first, and one GPU."""
    facts = [
        {"host": "node-7.lab", "gpu_uuid": UUID, "pid": 12},
        {"host": "alpha", "pid": 13, "env": {"SHORT": "s3cr3", "SWITCH": "true"}},
    ]
    return Redaction(pd.DataFrame({"facts": map(json.dumps, facts), "started_at": [2, 1]}))


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ('File "/home/ann/sweep/tasks/__main__.py", line 79', 'File "tasks/__main__.py", line 79'),
        (
            "/opt/v/lib/python3.12/site-packages/torch/nn/modules/module.py:1751",
            "torch/nn/modules/module.py:1751",
        ),
        ("/usr/lib/python3.12/threading.py", "threading.py"),
        ("--out=/scratch/ann/res/full", "--out=…/full"),
        ("~/private/mine.yaml", "…/mine.yaml"),
        ("/home/ann/sweeps/configs/full.yaml", "configs/full.yaml"),
        ("at 10.0.0.5:6379 and 192.168.1.20", "at …:6379 and …"),
        ("on node-7.lab, GPU-" + UUID, f"on host 2, {GPU}"),
        ("alpha", "host 1"),
        ("alphabet, pre-alpha", "alphabet, pre-alpha"),
        ("alpha.example, node-7.lab.corp.example.com", "host 1, host 2"),
        ("g++ -I/home/ann/v/include -L/home/ann/lib x.cpp", "g++ -I…/include -L…/lib x.cpp"),
        ("file:///home/ann/tokens.bin refused", "… refused"),
        ("s3://ann-private/x, gs://b", "…, …"),
        ("https://ann:hunter22@registry.example.com/simple", "…"),
        ("https://ann:hunter22@pytorch.org/x", "…"),
        ("https://huggingface.co/x?token=abc", "…"),
        ("other.corp.example.com:22", "…:22"),
        ("fe80::1ff:fe23:4567:890a, ::1, fe80::1%eth0", "…, …, …"),
        ("at 12:34:56, at::native::add", "at 12:34:56, at::native::add"),
        ("ann@alpha, ann@mail.example.com", "…, …"),
        ("~ann/.ssh/id_rsa, /home/ann, ~/x.yaml", "…, …, …/x.yaml"),
        ("open('/home/ann/my project/data.bin')", "open('…/data.bin')"),
        ("hf_PROCESSTOKEN123456", "…"),
        ("sk-proj-abcdefghijkl, AKIAIOSFODNN7EXAMPLE", "…, …"),
        ("wandbkey0123456789, 0123456789abcdef0123456789abcdef01234567", "…, …"),
        ("commit 2d1d756dff8b+", "commit 2d1d756dff8b+"),
        ("torch.nn.modules.linear.Linear", "torch.nn.modules.linear.Linear"),
        ("s3cr3 in s3cr3t, true", "… in …t, true"),
        (
            "ms/step, 1/2, a/b/c, tasks/train_step.py:153",
            "ms/step, 1/2, a/b/c, tasks/train_step.py:153",
        ),
        (
            "https://pytorch.org/docs/stable/notes/cuda.html",
            "https://pytorch.org/docs/stable/notes/cuda.html",
        ),
        ("torch 2.11.0+cu130, driver 580.159.04", "torch 2.11.0+cu130, driver 580.159.04"),
        (
            "void cutlass::Kernel2<cutlass_80_simt_sgemm>(T1::Params)",
            "void cutlass::Kernel2<cutlass_80_simt_sgemm>(T1::Params)",
        ),
    ],
)
def test_redaction_of_a_text_removes_folders_hosts_addresses_and_gpu_ids(
    redaction: Redaction, text: str, left: str
) -> None:
    assert redaction.text(text) == left


@pytest.mark.parametrize(
    ("text", "left"),
    [
        # Passwords of letters alone, hosts without a domain, users.
        ("connected as alice with correcthorse", "connected as … with …"),
        ("no route to dgxprod or dgx-prod-03", "no route to … or …"),
        ("token=hunter, key: Hunter22, s3cr3t, a1b2c3d4e5", "token=…, key: …, …, …"),
        ("peer gpunode17:29500 is gone", "peer … is gone"),
        ("peer node17 or gpu-node-17 is gone", "peer … or … is gone"),
        ("AliceError: mymodule.AliceModel", "…: …"),
        ("on node-7.lab and alpha", "on host 2 and host 1"),
        # Messages of torch, CUDA, Python and this program.
        (
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of"
            " 139.80 GiB of which 1.25 GiB is free.",
            None,
        ),
        ("mat1 and mat2 shapes cannot be multiplied (32x16 and 8x64)", None),
        ("expected scalar type Float but found BFloat16", None),
        ("CUDA error: an illegal memory access was encountered", None),
        ("No available kernel. Aborting execution.", None),
        ("RuntimeError: CUBLAS_STATUS_NOT_INITIALIZED", None),
        ("aten::_scaled_dot_product_flash_attention, torch.float32", None),
        ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", None),
        ("killed by SIGKILL, exited with code 137", None),
        ("not done after 600 s", None),
        ("its resident set passed host_memory_gib: 2.5", None),
        ("size=small precision=bf16 of cell 0a1b2c3d4e5f, commit 2d1d756dff8b", None),
        ("KeyError: 'weight'", None),
        ("Function MmBackward0 returned nan values in its 0 output", None),
    ],
)
def test_words_of_a_message_stay_if_they_are_known(text: str, left: str | None) -> None:
    attempts = {
        "facts": [json.dumps({"host": "node-7.lab"}), json.dumps({"host": "alpha"})],
        "started_at": [2, 1],
        "cell": ["0a1b2c3d4e5f"] * 2,
        "commit": ["2d1d756dff8b", None],
        "params": ['{"size": "small", "precision": "bf16"}'] * 2,
    }
    redaction = Redaction(pd.DataFrame(attempts))
    assert redaction.free_text(text) == (text if left is None else left)


def test_words_of_parameters_are_public(redaction: Redaction) -> None:
    assert redaction.free_text("zebra:Giraffe failed") == "… failed"
    facts, params = ['{"host": "alpha"}'], ['{"model": "zebra:Giraffe"}']
    attempts = pd.DataFrame({"facts": facts, "started_at": [1], "params": params})
    assert Redaction(attempts).free_text("zebra:Giraffe failed") == "zebra:Giraffe failed"


TRACEBACK = """Traceback (most recent call last):
  File "/home/ann/work/leaky.py", line 8, in forward
    password = "correcthorse"
  File "/opt/v/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1751, in _call_impl
    return forward_call(*args, **kwargs)
RuntimeError: correcthorse
"""


def test_evidence_is_published_in_known_forms(redaction: Redaction) -> None:
    evidence = {
        "message": "connect with correcthorse failed",
        "exception": "RuntimeError",
        "traceback": TRACEBACK,
        "log_tail": "correcthorse",
        "kernel_log": ["correcthorse"],
        "gpu_uuid": UUID,
        "asked_bytes": 7,
    }
    facts = {
        "imported_from": "/home/ann/correcthorse/trace.json",
        "settings_changed": "correcthorse → 1",
        "env": {"NCCL_HOSTID": "gpunode17", "PYTORCH_ALLOC_CONF": "max_split_size_mb:128"},
    }
    rows = pd.DataFrame({"facts": [json.dumps(facts)], "evidence": [json.dumps(evidence)]})
    found = redaction.table("attempts", rows).iloc[0]
    frames = (
        '  File "…/leaky.py", line 8, in forward\n'
        '  File "torch/nn/modules/module.py", line 1751, in _call_impl'
    )
    assert json.loads(found["evidence"]) == {
        "message": "connect with … failed",
        "exception": "RuntimeError",
        "traceback": frames,
        "gpu_uuid": GPU,
        "asked_bytes": 7,
    }
    assert json.loads(found["facts"]) == {
        "settings_changed": "… → 1",
        "env": {"NCCL_HOSTID": "…", "PYTORCH_ALLOC_CONF": "max_split_size_mb:128"},
    }


def test_the_address_of_a_cluster_is_not_published(redaction: Redaction) -> None:
    for words in (["--address", "gpunode17:6379"], ["--address=gpunode17:6379"]):
        manifest = {"invocations": [{"command": ["run", "c.yaml", *words]}]}
        assert "gpunode17" not in json.dumps(redaction.manifest(manifest))


def test_redaction_of_an_attempt_keeps_its_measured_facts(redaction: Redaction) -> None:
    facts = {
        "host": "alpha",
        "pid": 13,
        "gpu": "alpha 200",
        "flops": {"forward": 3},
        "torch": "2.11",
        "env": {"HF_TOKEN": "secret"},
    }
    evidence = {"traceback": 'File "/a/b/c.py", line 3', "asked_bytes": 7}
    rows = pd.DataFrame(
        {
            "facts": [json.dumps(facts)],
            "evidence": [json.dumps(evidence)],
            "params": ['{"model": "/a/b:C"}'],
        }
    )
    found = redaction.table("attempts", rows).iloc[0]
    kept = {"host": "host 1", "gpu": "host 1 200", "flops": {"forward": 3}, "torch": "2.11"}
    assert json.loads(found["facts"]) == {**kept, "env": {"HF_TOKEN": "…"}}
    traceback = 'File "…/c.py", line 3'
    assert json.loads(found["evidence"]) == {"traceback": traceback, "asked_bytes": 7}
    assert found["params"] == '{"model": "/a/b:C"}'  # of which the cell's id is made


def test_redaction_keeps_gpu_names_that_are_already_redacted() -> None:
    facts = [{"gpu_uuid": name} for name in ("GPU 7", UUID, f"GPU-{UUID}")]
    redaction = Redaction(pd.DataFrame({"facts": map(json.dumps, facts), "started_at": [1, 2, 3]}))
    rows = pd.DataFrame({"facts": map(json.dumps, facts), "evidence": ["{}"] * 3})
    assert [json.loads(one)["gpu_uuid"] for one in redaction.table("attempts", rows)["facts"]] == [
        "GPU 7",
        GPU,
        GPU,
    ]


def test_redaction_of_a_manifest_removes_secrets_folders_and_addresses(
    redaction: Redaction,
) -> None:
    manifest = {
        "config": {
            "name": "n",
            "env": {
                "HF_TOKEN": "secret",
                "NVIDIA_API_KEY": "secret",
                "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            },
        },
        "invocations": [
            {
                "command": ["run", "/home/ann/c.yaml", "--address", "10.0.0.5:6379"],
                "asked": {"env": {"HF_TOKEN": "secret"}},
            }
        ],
    }
    found = redaction.manifest(manifest)
    kept = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert found["config"]["env"] == {"HF_TOKEN": "…", "NVIDIA_API_KEY": "…", **kept}
    assert found["invocations"] == [
        {"command": ["run", "…/c.yaml", "--address", "…"], "asked": {"env": {"HF_TOKEN": "…"}}}
    ]
    assert manifest["config"]["env"]["HF_TOKEN"] == "secret"  # type: ignore[index]
    assert list(redaction.left_out()) == [
        "names of hosts: 2, called host 1 and so on",
        f"ids of GPUs: 1, called {GPU}",
        "process ids: 2",
        "value of the environment variable HF_TOKEN: 2",
        "value of the environment variable NVIDIA_API_KEY: 1",
        "addresses of networks: 1",
        "beginnings of absolute paths: 1",
    ]
