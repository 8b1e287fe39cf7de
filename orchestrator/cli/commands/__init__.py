"""One file per command of the command line, with the options and option types that commands share."""
