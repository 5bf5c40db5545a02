"""Training states in this node's memory: served to peers, copied to them, and who may ask.

Use `server`, `regions`, `copies`, `peer_tokens`. The format of a region is `agents/protocol/memory.py`; what workers
do with states is `agents/trainer/states`.
"""
