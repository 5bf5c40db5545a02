"""Importing this imports everything heavy that a worker needs; the fork server does it once, before it serves.

No thread, no process group, no CUDA context comes of it (a test says so), and no parallel operation of torch runs:
its thread pools are made at the first one, in the child.
"""

from __future__ import annotations

import warnings

with warnings.catch_warnings():  # Megatron tells every process that Transformer Engine and Apex are not there
    warnings.simplefilter("ignore")
    import agents.trainer.pretrain_gpt
    import agents.trainer.worker  # noqa: F401
