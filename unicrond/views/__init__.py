"""What is shown and decides nothing: stories, goodput, lemons, notifications, spans, plan previews, spares.

Each view takes steps (`view.py`) or a state; none is imported by `unicrond/core`. The text of every story is
made in `accounts.py`.
"""
