"""Replay: fold a log again to any point, read-only. No policy lives here; the folds are the coordinator's.

`cli` is unicron-replay; `reading` opens a log, `views` tells what is in it, `options` are words of the command line.
Two rooms are of unicrond-lab, another distribution: `simulation` fuzzes the real cores under virtual time, `evaluation`
compares policies on failure traces. A checkout has them here; installed, they are in a folder of their own.
"""

from importlib.util import find_spec

_laboratory = find_spec("unicrond_lab")
if _laboratory is not None:
    __path__.extend(_laboratory.submodule_search_locations or ())
