"""The training process: the hook for training loops, its groups, its state, and its ways back into training.

From the pure order of events outwards: `lifecycle`, `process`, `groups`, `gradients | states | detection`, `sharded`,
`loop` (hook and driver), `megatron`, `entry` (what the fork server runs). Arrows point one way.
"""
