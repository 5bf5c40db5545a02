"""The process group within one replica: the ranks that hold one copy of the model between them, those that share a
sequence, and those that share the samples of what the replica is assigned.

Rules
-----
* It is torch's default process group, met once under "replica/<task>/<replica>" in the launch's store, and never
  changes. Megatron's parallel_state lives in it and sees no other replicas, so nothing of Megatron's ever has to be
  bound anew. A lost rank ends the whole replica.
* *Sharers* are the ranks that have parts of the same loss: context-parallel ones, and Megatron's data-parallel ones
  (experts can be spread over more workers than tp and cp come to). Each sums the gradients of its part over the
  replicas; the replica's own sum, over Megatron's groups, comes once, behind that.
* The shards of a replica act as one: whatever depends on messages or on a collective of one shard's group is put to
  a vote of all its shards first. With one shard a vote costs nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from unicrond.agents.protocol.messages import Launch
from unicrond.agents.trainer.lifecycle.results import ReplicaWord
from unicrond.events.host.network_addresses import interface_of
from unicrond.events.megatron import command_line as megatron_lm

_MEET_TIMEOUT = timedelta(minutes=5)
#: What each shard's hook can, in the store.
_CAN_AUDIT, _CAN_AGREE = "can_audit/", "can_agree/"


WORLD_TEXT = (
    "unicrond has made it, a world of one replica, before the program began; leave init_process_group and"
    " destroy_process_group out (`if not dist.is_initialized():`), and make groups of your own with dist.new_group"
)


class WorldReplaced(RuntimeError):
    """The program has a default process group of its own; replicas would wait for ranks that are not there."""


def refuse_second_world(*_: object, **__: object) -> NoReturn:
    """Stand in the place of `init_process_group` once the world is there. Raises WorldReplaced."""
    raise WorldReplaced(f"init_process_group: the default process group is there already: {WORLD_TEXT}")


class ReplicaWorld:
    """This process as one rank of its replica: shard `shard` of `size`."""

    def __init__(self, launch: Launch, backend: str) -> None:
        """Join the replica's other ranks and set up Megatron's parallel state. Blocks until all are there."""
        spec = launch.spec
        self.size = spec.replica_workers
        self.sharers = spec.cut.cp * spec.cut.data
        self.shard = launch.shard
        self.device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        if interface := interface_of(launch.address):  # nothing of a task listens on the node's other networks
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        if self.size == 1:
            store = dist.HashStore()
        else:
            server = dist.TCPStore(launch.store.host, launch.store.port, None, False, _MEET_TIMEOUT)
            store = dist.PrefixStore(f"replica/{launch.task}/{launch.replica}", server)
        for ability in (_CAN_AUDIT, _CAN_AGREE):
            store.set(f"{ability}{self.shard}", "")
        dist.init_process_group(backend, store=store, rank=self.shard, world_size=self.size, timeout=_MEET_TIMEOUT)
        #: All shards' hooks know audits (`detection/audits.py`), which are all shards' or none's.
        self.can_audit = bool(store.check([f"{_CAN_AUDIT}{shard}" for shard in range(self.size)]))
        #: All shards' hooks know how to agree on a word (`agree`).
        self.can_agree = bool(store.check([f"{_CAN_AGREE}{shard}" for shard in range(self.size)]))
        self._world = dist.group.WORLD
        if spec.entry != megatron_lm.ENTRY:  # which sets it up from its own flags
            cut = spec.cut
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=cut.tp,
                pipeline_model_parallel_size=cut.pp,
                virtual_pipeline_model_parallel_size=cut.vpp if cut.vpp > 1 else None,
                context_parallel_size=cut.cp,
                expert_model_parallel_size=cut.ep,
                expert_tensor_parallel_size=cut.expert_tp if cut.ep > 1 or cut.etp else None,
            )

    def require_own_world(self) -> None:
        """Raises WorldReplaced where the program has put another default process group in the place of this one."""
        if dist.group.WORLD is not self._world:
            raise WorldReplaced(f"the program has replaced torch.distributed's default process group: {WORLD_TEXT}")

    def highest(self, *values: int) -> list[int]:
        """Return each value's maximum over the replica's shards."""
        return self._vote(values, dist.ReduceOp.MAX)

    def all_true(self, value: bool) -> bool:
        """Return whether `value` holds for every shard."""
        return bool(self._vote([int(value)], dist.ReduceOp.MIN)[0])

    def agree(self, word: ReplicaWord) -> ReplicaWord:
        """Return the replica's word, of what each shard says."""
        if not self.can_agree:
            return ReplicaWord(not self.all_true(not word.stop))
        stop, slowest_us, least_us, highest, lowest = self.highest(
            word.stop, word.pace_us, -word.pace_us, word.number, -word.number
        )
        return ReplicaWord(bool(stop), slowest_us if least_us else 0, highest if highest == -lowest else 0)

    def from_last_stage(self, *values: float) -> list[float]:
        """Return the values of the replica's last rank, which is in the last pipeline stage, where the loss is; their
        sum, where it has sharers."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.sharers == 1:
            dist.broadcast(tensor, src=self.size - 1)
            return [float(value) for value in tensor.tolist()]
        in_last_stage = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        last_of_group = parallel_state.get_tensor_model_parallel_world_size() - 1
        if not in_last_stage or parallel_state.get_tensor_model_parallel_rank() != last_of_group:
            tensor.zero_()
        rows = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(rows, tensor)
        return [sum(column) for column in zip(*(row.tolist() for row in rows), strict=True)]

    def sum_over_sharers(self, tensor: torch.Tensor) -> None:
        """Make the tensor the sum of the sharers'; all of them call this."""
        if self.sharers > 1:
            dist.all_reduce(tensor, group=parallel_state.get_data_parallel_group(with_context_parallel=True))

    def from_last_rank(self, text: bytes) -> bytes:
        """Return the text of the replica's last rank."""
        if self.size == 1:
            return text
        length = torch.tensor([len(text)], dtype=torch.int64, device=self.device)
        dist.broadcast(length, src=self.size - 1)
        row = torch.zeros(int(length), dtype=torch.uint8, device=self.device)
        if self.shard == self.size - 1:
            row.copy_(torch.tensor(list(text), dtype=torch.uint8))
        dist.broadcast(row, src=self.size - 1)
        return bytes(row.tolist())

    def gather(self, row: bytes) -> list[bytes]:
        """Return every shard's row; all are of the same length."""
        if self.size == 1:
            return [row]
        own_row = torch.tensor(list(row), dtype=torch.uint8, device=self.device)
        rows = [torch.empty_like(own_row) for _ in range(self.size)]
        dist.all_gather(rows, own_row)
        return [bytes(gathered.tolist()) for gathered in rows]

    def _vote(self, values: Sequence[int], operation: object) -> list[int]:
        if self.size == 1:
            return list(values)
        votes = torch.tensor(values, dtype=torch.int64, device=self.device)
        dist.all_reduce(votes, op=operation)
        return [int(vote) for vote in votes.tolist()]
