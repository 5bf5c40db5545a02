"""The floor that agents and coordinator share: the events, the logs that hold them, and what both sides need.

Rooms, from the ground up: `host` (this machine), `vocabulary` (the events), `wire` (their bytes), `log` (the protocol
of a log; memory and files), `trust` (keys, certificates, logins), `queries` (questions to nodes), `nats` (the log on
JetStream), `archive`, `megatron` (what a Megatron-LM command line says), `cli` (the commands' common parser). Nothing
here decides anything; nothing here imports the coordinator, an agent or replay.
"""
