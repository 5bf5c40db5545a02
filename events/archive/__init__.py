"""The older part of the event log, in files: copied before the stream forgets it, read as one log with the rest.

Use `archive.Archive` and `archived_log`. When it runs and what it removes from NATS is decided in
`unicrond/service/event_log/retention.py`.
"""
