"""State and events as tables, lines and pictures."""
