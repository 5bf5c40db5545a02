"""This machine, for daemons: init process, systemd, log lines, backoff, addresses, optional dependencies, masking.

Modules are independent of each other and of events. What only agents need of the host lives in `agents/host`.
"""
