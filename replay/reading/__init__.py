"""Where a log is read from, and up to which point."""
