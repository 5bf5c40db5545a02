"""What leaves the head on its own: notifications and their transports, traces.

What is worth telling is decided in `unicrond/views`.
"""
