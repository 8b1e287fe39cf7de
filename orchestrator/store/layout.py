"""The names of files and folders in a results folder."""

from __future__ import annotations

PUBLICATION_FILE = "publication.json"  # in a folder of published runs: what is in it
CONFIG_FILE = "config.yaml"  # in each of them
REDACTED = "…"  # there, for what is of the machine that measured it
RUN_SEPARATOR = ":"  # between the name of a run and the id of its cell, where runs are read as one
