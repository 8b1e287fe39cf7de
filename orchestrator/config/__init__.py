"""From a YAML file to cells: load, validate, select, expand."""
