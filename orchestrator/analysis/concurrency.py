"""Which attempts ran while others did on the same host, from when each began and how long it took."""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np
import pandas as pd

SOME = 0.5  # in the mean over its time: from where on others ran beside an attempt


def hosts_of(facts: Iterable[str]) -> list[str]:
    """From the facts of each attempt; empty where it did not come so far."""
    return [json.loads(text).get("host") or "" for text in facts]


def neighbours(attempts: pd.DataFrame) -> pd.Series[float]:
    """How many others ran on the host of each attempt, in the mean over its time. Of attempts with host, started_at and wall_s;
    null of one whose host is not known.
    """
    beside = pd.Series(np.nan, index=attempts.index)
    begins = attempts["started_at"].map(lambda at: at.timestamp())
    for _, own in attempts[attempts["host"] != ""].groupby("host"):
        begin, wall = begins[own.index].to_numpy(), own["wall_s"].to_numpy()
        edges = np.concatenate([begin, begin + wall])
        order = np.argsort(edges, kind="stable")
        running = np.cumsum(np.repeat([1, -1], len(own))[order])
        spent = np.concatenate(
            [[0.0], np.cumsum(running[:-1] * np.diff(edges[order]))]
        )  # by all of them, until each edge
        until = np.interp(np.concatenate([begin, begin + wall]), edges[order], spent)
        by_others = until[len(own) :] - until[: len(own)] - wall
        beside[own.index] = np.divide(
            by_others, wall, out=np.zeros_like(wall), where=wall > 0
        ).clip(min=0)
    return beside
