"""Questions to nodes over NATS request and reply, and the form of their answers.

`worker_queries` (output, stacks, marks, flight recorders), `node_checks` and `pair_sums` (`unicronctl doctor`),
`finding` (a problem and its fix), `collectives`. Agents answer in `agents/output` and `agents/health`; the head asks
in `unicrond/service/api`.
"""
