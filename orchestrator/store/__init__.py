"""A results folder: Parquet parts, the manifest, the one locked writer, and several runs read as one."""
