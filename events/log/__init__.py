"""The event log as a protocol, and its two implementations without a server: in memory and in files.

Use `event_log.EventLog` (the protocol; one contract suite holds for all), `memory_log`, `file_log` over `segments`,
`subjects` (names of streams, subjects, headers), `lease` (which head leads), `heartbeat_evidence`, `skips`. The log
on NATS JetStream lives in `nats`, its older part in `archive`.
"""
