"""Checks whether this node is fit to work: preflight, self-test, the doctor's checks, pair sums; injects faults on
request.

Use `preflight`, `health_check` (runs `self_test` in a child), `doctor_checks`, `pair_sum`, `node_faults`. GPUs' own
reports live in `agents/accelerators`.
"""
