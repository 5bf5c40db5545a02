"""What `unicrond/core/decide.py` decides, by subject; the rules and their order stand there."""
