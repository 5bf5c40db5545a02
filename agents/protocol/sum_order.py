"""A sum with other nodes, for `unicronctl doctor`. Part of messages.py."""

from __future__ import annotations

from unicrond.agents.protocol.message import WireMessage
from unicrond.events.queries.pair_sums import Library, Pair, Seconds, Token
from unicrond.events.vocabulary import Text


class Sum(WireMessage, frozen=True, kw_only=True):
    """(agent -> fork server) fork a process that sums with other nodes (pair_sum.py; see LinksCheck). `address`: this
    node's. `answer`: the Unix socket to which the process sends the outcome. `gpu`: the one that NCCL sums on.
    `asked_s`: the time of the request, by the machine's monotonic clock."""

    address: Text
    token: Token
    pairs: tuple[Pair, ...]
    library: Library
    limit_s: Seconds
    answer: Text
    asked_s: float
    gpu: Text = ""
