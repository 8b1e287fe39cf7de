"""Kills processes of attempts with two ranks at random moments, and checks that nothing is left.

    python -m tests.killing_ranks --times 20 --seed 1

The ranks reduce numbers with gloo for ever, so that either waits in a collective if the other is gone.
Each round begins a driver with a new fork server, whose minder runs the ranks. It kills the driver, the fork
server, the minder or a rank. Printed is what is left five seconds later, and how the driver ended. Exit code
1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import psutil

from orchestrator.execution.fork_client import Connection, ForkServerLost
from orchestrator.scheduling.ray_reaper import has_ended
from tasks.process.fork_server import run_fork_server
from tasks.process.lifeline import die_with_parent
from tasks.process.minder import MindRequest
from tests.killing import LEFT_S, role_of

RANKS = 2
ROLES = ("driver", "server", "minder", "rank")


def reduce_for_ever(port: str, file: str, rank: int) -> None:
    """Run a rank. Its two words stand where the files of an attempt and its journal do."""
    import torch
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", int(port), RANKS, is_master=rank == 0)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(hours=1)
    )
    numbers = torch.ones(1000)
    while True:
        dist.all_reduce(numbers)
        numbers.fill_(1.0)
        Path(f"{file}-{rank}").touch()


def drive(folder: Path) -> None:
    """Start a fork server and one attempt, and print how it ended."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    address = f"\0killing-ranks-{os.getpid()}"
    listener.bind(address)
    listener.listen()
    lifeline, ours = os.pipe()
    if os.fork() == 0:
        os.close(ours)
        os.setsid()
        die_with_parent(lifeline)
        run_fork_server(listener, "cpu", reduce_for_ever)
    listener.close()
    os.close(lifeline)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    channel.connect(address)
    connection = Connection(channel)
    request = MindRequest(
        "ranks", str(port), str(folder / "reduced"), str(folder / "log"), str(folder), {}
    )
    body = {**asdict(request), "ranks": RANKS, "preparation_s": 600.0}
    connection.send(json.dumps({"measure": body}))
    try:
        connection.receive(60.0)
        print("ended:", connection.receive(600.0)["codes"], flush=True)
    except ForkServerLost:
        print("ended: lost", flush=True)
    os._exit(0)  # the end of an interpreter with torch takes seconds


def play(chance: random.Random, role: str) -> list[str]:
    """Return what was wrong after the kill of a process of this role."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        driver = subprocess.Popen(
            [sys.executable, "-m", "tests.killing_ranks", "--drive", name],
            stdout=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 60
        while len(list(Path(name).glob("reduced-*"))) < RANKS:
            if time.monotonic() > deadline:
                driver.kill()
                return ["the ranks did not begin"]
            time.sleep(0.05)
        time.sleep(chance.uniform(0, 1))
        processes = [psutil.Process(driver.pid)]
        processes += processes[0].children(recursive=True)
        roles = {"driver": [processes[0]]}
        for process in processes[1:]:
            roles.setdefault(role_of(process), []).append(process)
        chance.choice(roles[role]).kill()
        if role == "server":  # the attempt goes on
            time.sleep(1.0)
            goes_on = all(not has_ended(process) for process in roles["rank"])
            driver.kill()
        _, left = psutil.wait_procs(processes[1:], LEFT_S)
        wrong = [f"left: {process}" for process in left if not has_ended(process)]
        output, _ = driver.communicate()
        if role == "server" and not goes_on:
            wrong.append("the ranks ended with the fork server")
        expected = {"minder": "ended: lost", "rank": "ended: ["}.get(role, "")
        if not output.startswith(expected):
            wrong.append(f"the driver printed {output!r}")
        return wrong


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--drive", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        drive(options.drive)
        return
    chance, failed = random.Random(options.seed), False
    for turn in range(options.times):
        role = ROLES[turn % len(ROLES)]
        wrong = play(chance, role)
        print(f"{turn + 1}: {role} killed; {wrong or 'nothing is left'}", flush=True)
        failed = failed or bool(wrong)
    sys.exit(failed)


if __name__ == "__main__":
    main()
