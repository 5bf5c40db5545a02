"""The shell around the core: the coordinator's process."""
