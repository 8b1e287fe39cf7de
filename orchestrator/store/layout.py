"""The names of files and folders in a results folder.

run.json        config, selection, hardware and software, and every command; replaced by rename
stored.json     the batches of the run, each file with its SHA-256; replaced by rename
0008.log        the attempts after the last batch, here 0007: one a line, appended
attempts/       0007.parquet: up to 128 attempts, written once; the files of a batch share a number
samples/        what these attempts measured
kernels/        the kernels of those that were profiled
allocations/    the allocations of those with a snapshot of the device's memory
live/           live memory over time in those snapshots
predictions/    the predicted memory of cells, a file per command
models/         NAME/config.json of each model of transformers that is no preset
artifacts/      CELL/NUMBER/: attempt.json, journal.jsonl, log.txt, rerun.sh, traces
cells.parquet   a row per cell, derived from the tables; replaced by rename
report/         what `sweep report` writes
damaged/        files of batches that are not listed: damaged ones, and those of a killed driver
cache/          compiled kernels, shared by the cells of the run
.lock           locked by the driver that writes; has a line for each driver that did

Runs of older versions have Parquet parts of one attempt each in the folders of their tables, or
merged ones. They are read, and stay as they are (see `old_parts`).
"""

from __future__ import annotations

# Raise it when a stored table changes so that older versions could no longer read it. A new table
# is no such change, because older versions ignore tables that they do not know.
SCHEMA_VERSION = 2

ATTEMPTS = "attempts"
ARTIFACTS = "artifacts"
MODELS = "models"
REPORT = "report"
CACHE = "cache"  # also the folder of an attempt that compiles with an empty cache
CELLS_FILE = "cells.parquet"
LISTING_FILE = "stored.json"
DAMAGED_FOLDER = "damaged"
LOCK_FILE = ".lock"

# `sweep publish` puts runs next to each other in one folder.
PUBLICATION_FILE = "publication.json"  # which runs, and the digests of all files
CONFIG_FILE = "config.yaml"  # in each of the runs
REDACTED = "…"  # replaces names and paths of the machine that measured

RUN_SEPARATOR = ":"  # in RUN:CELL, the name of a cell in a collection of runs
