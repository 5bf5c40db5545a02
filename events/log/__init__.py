"""The event log as a protocol, and its entries in files.

Use `event_log.EventLog` (the protocol; one contract suite holds for all), `segments` and their `segment_writer`,
`subjects` (names of streams, subjects, headers), `lease` (which head leads), `heartbeat_evidence`, `skips`. The log
on NATS JetStream lives in `nats`, its older part in `archive`.
"""
