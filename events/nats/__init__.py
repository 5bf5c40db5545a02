"""The event log, heartbeats, commands and the heads' lease on NATS JetStream, and the embedded nats-server.

Use `connection.Connection` (it outlives outages), `event_log.NatsEventLog`, `commands`, `lease`,
`server.EmbeddedServer`. `durability` checks a foreign server's settings, `streams` names the API requests, `decode`
prints one message for NATS's own client. `event_log` repeats an append without a double (message ids:
`log/subjects.py`; the server's window: `streams`) and fences it; `terms` only listens for the newest term. Who may log
in lives in `trust/logins.py` and `trust/accounts.py`; the protocol of a log lives in `log`.
"""
