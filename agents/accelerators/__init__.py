"""The node's GPUs: their driver, and a watch that passes what it finds to the agent's core."""
