"""Megatron-core of other releases: what the trainer uses of it (`core_seams.py`), and where that is missing
(`canary.py`); every tested set of versions, from wheels alone (`matrix.py`)."""
