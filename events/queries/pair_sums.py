"""Two nodes that sum something, for `unicronctl doctor`: what checks of nodes and an agent's processes tell of it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from unicrond.events.vocabulary import Name, StoreAddress

Seconds = Annotated[float, Meta(gt=0.0, le=600.0)]
#: Part of a file's name, and of a key in a store.
Token = Annotated[str, Meta(pattern=r"^[0-9a-f]{16,64}\Z")]
#: What sums: gloo, or NCCL on a GPU whose slot no worker has.
Library = Literal["gloo", "nccl"]


class Pair(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two nodes that sum something: `rank` 0 and 1, which meet at rank 0's store. A pair of a lower `turn` comes
    first where there can be only one at a time."""

    peer: Name
    rank: Annotated[int, Meta(ge=0, le=1)]
    store: StoreAddress
    turn: Annotated[int, Meta(ge=0, le=2)]
