"""The node's accelerators: the driver's reports, and a watch that passes findings to the agent's core."""
