"""Text that commands print: functions that turn results into lines."""
