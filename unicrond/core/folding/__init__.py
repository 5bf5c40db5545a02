"""What each event does to the state, by subject; `unicrond/core/fold.py` is the door and holds the table."""
