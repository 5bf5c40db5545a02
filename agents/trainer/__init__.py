"""The training process: the hook for training loops, its groups, its state, and its ways back into training."""
