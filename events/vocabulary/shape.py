"""A replica's layout: the degrees by which its model is cut, and the samples of its micro-batches."""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import NamedTuple


def data_ranks(tp: int, cp: int, ep: int, etp: int) -> int:
    """Return the data-parallel ranks of a replica: the fewest with which its experts, over `ep` times `etp` workers
    (0: as `Shape.expert_tp` says), come out even; 1 where tp and cp have room for them."""
    spread = ep * (etp or usual_expert_tp(tp, ep))
    return spread // gcd(spread, tp * cp)


def usual_expert_tp(tp: int, ep: int) -> int:
    """Return in how many parts an expert is cut where a layout says nothing of it: those that make tp with ep, or
    1."""
    return tp // ep if tp % ep == 0 else 1


@lru_cache(4096)  # a plan asks for few layouts, often
def replica_size(tp: int, pp: int, cp: int, ep: int, etp: int) -> int:
    """Return the workers of one replica: the unit that lives or falls as a whole."""
    return tp * cp * pp * data_ranks(tp, cp, max(ep, 1), etp)


class Shape(NamedTuple):
    """A layout: tensor-parallel groups of `tp` workers, `pp` of them (pipeline stages), each stage with `vpp` chunks of
    the model (virtual stages), a sequence over `cp` such groups, experts over `ep` workers, each cut in `etp` parts (0:
    as many as make tp with ep, or 1). `micro_batch`: samples, of one data-parallel rank; 0: as many as the task has in
    all its layouts."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    micro_batch: int = 0
    cp: int = 1
    etp: int = 0

    @property
    def workers(self) -> int:
        """Return workers in one replica."""
        return replica_size(self.tp, self.pp, self.cp, self.ep, self.etp)

    @property
    def groups(self) -> int:
        """Return tensor-parallel groups in one replica, each of which is on one node."""
        return self.workers // self.tp

    @property
    def expert_tp(self) -> int:
        """Return in how many parts each expert is cut."""
        return self.etp or usual_expert_tp(self.tp, self.ep)

    @property
    def data(self) -> int:
        """Return the data-parallel ranks in one replica. Each computes its own part of what is assigned to that: one
        Megatron micro-batch."""
        return data_ranks(self.tp, self.cp, self.ep, self.etp)

    @property
    def factors(self) -> dict[str, int]:
        """Return what a replica's workers are the product of, by name."""
        more = {"cp": self.cp, "data-parallel ranks inside it": self.data}
        return {"tp": self.tp, "pp": self.pp, **{name: size for name, size in more.items() if size > 1}}

    @property
    def plain(self) -> Shape:
        """Return it in the one form of those that mean the same: `etp` 0 where that says what it says."""
        return self._replace(etp=0) if self.etp and self.etp == usual_expert_tp(self.tp, self.ep) else self

    @property
    def cut(self) -> Shape:
        """Return it as far as a state depends on it."""
        return self._replace(micro_batch=0)

    def fits(self, replica: tuple[str, ...]) -> bool:
        """Say whether the replica, the node of each of its shards, has this shape: one node per tensor-parallel
        group."""
        if len(replica) != self.workers:
            return False
        starts = range(0, len(replica), self.tp) if self.tp > 1 else ()
        return all(len(set(replica[start : start + self.tp])) == 1 for start in starts)

    def __str__(self) -> str:
        text = [f"tp {self.tp}", f"pp {self.pp}"]
        text += [f"cp {self.cp}"] if self.cp > 1 else []
        text += [f"{name} {degree}" for name, degree in (("vpp", self.vpp), ("ep", self.ep)) if degree > 1]
        text += [f"etp {self.etp}"] if self.etp else []
        text += [f"micro-batches of {self.micro_batch}"] if self.micro_batch else []
        return ", ".join(text)
