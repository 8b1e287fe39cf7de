"""Config of a sweep: load YAML, validate it, and expand it into cells."""
