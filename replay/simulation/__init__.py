"""The whole control plane under virtual time: the real cores, seeded faults, invariants with names.

See docs/design/simulation.md. What is real: the coordinator (unicrond/service/coordinator/coordinator.py and every core
under it), the agent's core and outbox, the trainer's dealing, regrouping, ledger and sampling. What is modelled: time,
the log's server, networks, disks, processes and the fork server, the collectives of a group.
"""
