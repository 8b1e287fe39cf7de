"""What the kernel did meanwhile, by the files in which it says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.execution import oom_killer as kernel

XID = "4,1,2,-;NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', GPU has fallen off the bus.\n SUBSYSTEM=pci\n"


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kernel, "_KERNEL_LOG", str(tmp_path / "kmsg"))
    (tmp_path / "kmsg").write_text(XID.replace("79", "31"))
    return tmp_path / "kmsg"


def test_the_watch_of_the_kernel_log_returns_only_new_lines_about_gpus(log: Path) -> None:
    with kernel.OomKillerWatch() as watch:
        assert watch.lines() == ()
        with log.open("a") as file:
            file.write(XID)
        assert watch.lines() == (
            "NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', GPU has fallen off the bus.",
        )
        with log.open("a") as file:
            file.write("6,2,3,-;usb 1-1: new device\n")
        assert watch.lines() == ()


def test_a_log_that_may_not_be_read_says_nothing(log: Path) -> None:
    log.unlink()
    with kernel.OomKillerWatch() as watch:
        assert watch.lines() == ()


HOST = "pgfault 7\noom_kill 5\n"


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        (
            {
                "/proc/self/cgroup": "0::/a/b\n",
                "/sys/fs/cgroup/a/b/memory.events": "oom 9\noom_kill 3\n",
            },
            3,
        ),
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/memory.events": "oom_kill 2\n"}, 2),
        (
            {
                "/proc/self/cgroup": "4:memory:/a\n0::/\n",
                "/sys/fs/cgroup/memory/a/memory.oom_control": "oom_kill 1\n",
            },
            1,
        ),
        ({"/proc/self/cgroup": "0::/\n"}, 5),  # the group of a whole host has no counter
        ({}, 5),
    ],
)
def test_oom_kills_are_counted_in_the_control_group_or_else_on_the_host(
    files: dict[str, str], kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In our own control group, where it says so, and else on the host."""
    said: dict[str, str] = {}
    monkeypatch.setattr(kernel, "_read_text", lambda path: said.get(str(path), ""))
    before = {
        path: text.replace(f"oom_kill {kills}", "oom_kill 0")
        for path, text in {**files, "/proc/vmstat": HOST}.items()
    }
    said |= before
    with kernel.OomKillerWatch() as watch:
        assert watch.oom_kills() == 0
        said |= {"/proc/vmstat": HOST, **files}
        assert watch.oom_kills() == kills
