"""The names of files and folders in a results folder."""

from __future__ import annotations

ATTEMPTS = "attempts"  # the folder of the table whose rows complete an attempt
ARTIFACTS = "artifacts"  # CELL/NUMBER/ in it: what the attempt's process left
REPORT = "report"
CACHE = "cache"  # of compilers; shared by the cells of a run, or an attempt's own
CELLS_FILE = "cells.parquet"
LOCK_FILE = ".lock"

PUBLICATION_FILE = "publication.json"  # in a folder of published runs: what is in it
CONFIG_FILE = "config.yaml"  # in each of them
REDACTED = "…"  # there, for what is of the machine that measured it
RUN_SEPARATOR = ":"  # between the name of a run and the id of its cell, where runs are read as one
