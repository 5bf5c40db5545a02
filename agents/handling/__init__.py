"""The handling of each input by the agent's core, by subject; `agents/core.py` is the entry and holds the rules."""
