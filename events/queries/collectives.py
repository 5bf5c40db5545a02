"""The last collectives of a worker, as its flight recorder has them. Brings nothing that a worker need not have."""

from __future__ import annotations

import msgspec

from unicrond.events.vocabulary import Count, Text


class Collective(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of a flight recorder: what torch remembers of the collectives of a process.

    `library`: gloo or nccl. `group`: its number in the process. `number`: the collective's number in its group; for
    point-to-point transfers (`is_p2p`) the transfer's. `state`: scheduled, started or completed; gloo reports only the
    first. `is_over`: it has ended. `sizes`: of the inputs, with their types. `since_us`: how long ago it was recorded.
    """

    library: Text
    group: Count
    number: Count
    is_p2p: bool
    name: Text
    state: Text
    is_over: bool
    sizes: Text
    since_us: Count


#: Of one worker, in one reply.
COLLECTIVES_MAX = 64
