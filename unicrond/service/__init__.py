"""The shell around the core: the head's process.

`coordinator` (the loop: read, fold, decide, append), `head` (which head leads, start and stop), `api` (HTTP),
`event_log` (archive, retention, backup), `trust` (logins, certificates), `export` (notifications, traces).
"""
