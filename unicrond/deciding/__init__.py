"""What `unicrond/decide.py` decides, by subject; the rules and their order stand there."""
