"""The training process: the hook for training loops, process groups that can be replaced, gradients, training state.

From the pure order of events outwards: `lifecycle`, `process`, `groups`, `gradients | states | detection`, `sharded`,
`loop` (hook and driver), `megatron`, `entry` (what the fork server runs). Arrows point one way.
"""
