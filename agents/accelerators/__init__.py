"""The node's accelerators: what their driver reports, and a watch that tells the agent's core of it."""
