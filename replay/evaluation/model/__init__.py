"""The simulated world that all policies share: clock, nodes, workload, failure traces, costs.

Policies live in `policies`, one run in `simulator`, studies and write-ups in `studies`.
"""
