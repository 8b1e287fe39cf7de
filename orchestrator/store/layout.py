"""The names of files and folders in a results folder.

run.json        config, selection, hardware and software, and every command; replaced by rename
attempts/       a part per attempt, written last: its presence means that the attempt is stored
samples/        a part per attempt that measured something
kernels/        a part per attempt whose kernels were profiled
allocations/    a part per attempt with a snapshot of the device's memory
live/           live memory over time in those snapshots
predictions/    a part per command that predicted the memory of its cells
models/         NAME/config.json of each model of transformers that is no preset
artifacts/      CELL/NUMBER/: attempt.json, journal.jsonl, log.txt, rerun.sh, traces
cells.parquet   a row per cell, derived from the parts; replaced by rename
report/         what `sweep report` writes
cache/          compiled kernels, shared by the cells of the run
.lock           locked by the driver that writes
"""

from __future__ import annotations

# Raise it when a stored table changes so that older versions could no longer read it. A new table
# is no such change, because older versions ignore tables that they do not know.
SCHEMA_VERSION = 1

ATTEMPTS = "attempts"
ARTIFACTS = "artifacts"
MODELS = "models"
REPORT = "report"
CACHE = "cache"  # also the folder of an attempt that compiles with an empty cache
CELLS_FILE = "cells.parquet"
LOCK_FILE = ".lock"

# `sweep publish` puts runs next to each other in one folder.
PUBLICATION_FILE = "publication.json"  # which runs, and the digests of all files
CONFIG_FILE = "config.yaml"  # in each of the runs
REDACTED = "…"  # replaces names and paths of the machine that measured

RUN_SEPARATOR = ":"  # in RUN:CELL, the name of a cell in a collection of runs
