"""One head's process: start, standby, lease, leadership, stop; and the ports that answer before it is ready.

Use `daemon` (`unicrond run`) and `head.Head`. When a head may lead is decided in `unicrond/core/nodes/leadership.py`.
"""
