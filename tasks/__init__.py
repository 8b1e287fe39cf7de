"""What can be measured (one file a task), how it is watched (`instruments`), and what both are written against (`harness`)."""
