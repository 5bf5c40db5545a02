"""A replica's layout: the degrees by which its model is cut, and the samples of its micro-batches."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """A layout: tensor-parallel groups of `tp` workers, `pp` of them (pipeline stages), each stage with `vpp` chunks of
    the model (virtual stages), experts over `ep` of a group's workers. `micro_batch`: samples; 0: as many as the task
    has in all its layouts."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    micro_batch: int = 0

    @property
    def workers(self) -> int:
        """Return workers in one replica."""
        return self.tp * self.pp

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
        text += [f"{name} {degree}" for name, degree in (("vpp", self.vpp), ("ep", self.ep)) if degree > 1]
        text += [f"micro-batches of {self.micro_batch}"] if self.micro_batch else []
        return ", ".join(text)
