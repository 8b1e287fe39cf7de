"""The contract between measuring and orchestrating: parameters, cells, attempts and records. Imports no torch."""
