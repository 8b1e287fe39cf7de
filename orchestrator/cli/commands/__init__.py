"""One file per command of the command line, and the options and option types that they share."""
