"""The folded state of the cluster: frozen values, made by the fold alone, their lifecycles and their bytes.

Use `state.ClusterState`, `task_parts`, `workers`, `policy`, `state_bytes.digest`. What changes them lives in
`folding`.
"""
