"""Planted bugs of the agent and of the trainer. See `table.py`."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from unicrond.agents.core import commands as orders
from unicrond.agents.core import commit_sums, exits, memberships, starting
from unicrond.agents.core import machine as core
from unicrond.agents.core.state import Remembered
from unicrond.agents.trainer.lifecycle import (
    deal,
    iteration,
    ledger,
    micro_batch_assignment,
    regrouping,
    shares,
    verdict,
)
from unicrond.agents.trainer.lifecycle import membership_choice as meeting
from unicrond.agents.trainer.lifecycle import optimizer_state as dividing
from unicrond.agents.trainer.lifecycle.effects import GatherRows, PendingGeneration
from unicrond.replay.simulation.cluster.log_client import CommandEnd
from unicrond.replay.simulation.models import memory
from unicrond.replay.simulation.mutants.mutation import Mutant, patch
from unicrond.replay.simulation.trainer import buckets

# --- the agent -----------------------------------------------------------------------------------


def _act_on_a_stale_epoch() -> None:
    def make(commanded: Any) -> Any:
        """Wrap `commanded`."""

        def unfenced(turn: Any, order: Any) -> None:
            """Handle a stale command as a new one."""
            if (order.term, order.command.epoch) < turn.memory.fence:
                # All that would recognise it has to go: the fence is not the only defence.
                turn.remember(fence=(0, 0), answers={}, ended_workers={})
            commanded(turn, order)

        return unfenced

    patch(orders, "commanded", make)


def _start_again() -> None:
    def make(commanded: Any) -> Any:
        """Wrap `commanded`."""

        def forgetful(turn: Any, order: Any) -> None:
            """Handle the command as if none had been answered."""
            turn.remember(answers={}, ended_workers={})
            commanded(turn, order)

        return forgetful

    patch(orders, "commanded", make)


def _forget_the_memory() -> None:
    patch(core, "resume", lambda resume: lambda config, memory: resume(config, Remembered()))


def _early_end_is_expected() -> None:
    patch(exits, "left_early", lambda _: lambda record, mark: False)


def _follow_no_task() -> None:
    def make(_: Any) -> Any:
        """Build the replacement."""

        async def follow(self: Any, tasks: Any) -> None:
            """Follow no task."""
            self._tasks = frozenset()

        return follow

    patch(CommandEnd, "follow", make)


def _old_parts_stay() -> None:
    def collect(add_part: Any) -> Any:
        """Wrap `add_part`."""

        def more(telling: Any, part: Any, term: int) -> Any:
            """Add the part to all that came before."""
            start = telling or add_part(None, msgspec.structs.replace(part, part=1, seats=()), term)
            return msgspec.structs.replace(start, seats=start.seats + part.seats)

        return more

    patch(memberships, "add_part", collect)
    patch(
        memberships,
        "broadcast_seats",
        lambda _: lambda telling, broadcast, *_: (telling.seats if telling else ()) + broadcast.seats,
    )


def _slots_are_not_counted() -> None:
    patch(starting, "free_slots", lambda _: lambda turn: list(range(turn.config.slots)))


def _commits_are_summed_twice() -> None:
    patch(commit_sums, "continues", lambda _: lambda before, worker, commit: before.worker == worker)


# --- the trainer ---------------------------------------------------------------------------------


def _commit_without_agreement() -> None:
    def make(agree: Any) -> Any:
        """Wrap `agree`."""

        def hasty(member: Any) -> Any:
            """Enter the step without an agreement."""
            if member.shares is not None:  # there the agreement also says what is saved
                yield from agree(member)
            else:
                member.enter("agreeing")
                member.target = yield from PendingGeneration()

        return hasty

    patch(iteration, "_agree", make)


def _throw_away_complete_sums() -> None:
    def make(judge: Any) -> Any:
        """Wrap `judge`."""

        def hasty(*positions: Any, **whole: Any) -> Any:
            """Judge that no member steps first."""
            return dataclasses.replace(judge(*positions, **whole), step_first=frozenset())

        return hasty

    patch(verdict, "judge", make)


def _keep_any_bucket() -> None:
    def make(judge: Any) -> Any:
        """Wrap `judge`."""

        def generous(positions: Any, micro_batches: int, **whole: Any) -> Any:
            """Judge a bucket final where one member has its sum."""
            verdict = judge(positions, micro_batches, **whole)
            sums = [bucket for position in positions if position.has_state for bucket in position.complete]
            final = frozenset() if verdict.step_first else frozenset(sums)
            return dataclasses.replace(verdict, final=final)

        return generous

    patch(verdict, "judge", make)


def _deal_what_is_held() -> None:
    def make(assign: Any) -> Any:
        """Wrap `assign`."""
        return lambda assignments, *rest: assign([()] * len(assignments), *rest)

    patch(micro_batch_assignment, "assign_evenly", make)


def _deal_to_the_slow() -> None:
    patch(deal.Dealing, "_judge", lambda _: lambda self: None)


def _lanes_out_of_order() -> None:
    def make(chains: Any) -> Any:
        """Wrap `chains`."""

        def reversed_behind_a_border(*arguments: Any) -> Any:
            """Return the chains with reversed micro-batches behind each boundary."""
            by_lane = chains(*arguments)
            return {
                lane: [*chain[:1], *((member, micro_batches[::-1]) for member, micro_batches in chain[1:])]
                for lane, chain in by_lane.items()
            }

        return reversed_behind_a_border

    patch(micro_batch_assignment, "_chains", make)


def _lanes_by_another_tree() -> None:
    patch(
        buckets,
        "tree",
        lambda tree: lambda block, sums, add: tree(block, sums, lambda first, second: add(second, first)),
    )


def _a_border_twice() -> None:
    def make(chains: Any) -> Any:
        """Wrap `chains`."""

        def overlapping(*arguments: Any) -> Any:
            """Return the chains with the micro-batch at a boundary on both sides."""
            by_lane = chains(*arguments)
            for chain in by_lane.values():
                for place, (_, before) in enumerate(chain[:-1]):
                    chain[place + 1] = chain[place + 1][0], (*before[-1:], *chain[place + 1][1][1:])
            return by_lane

        return overlapping

    patch(micro_batch_assignment, "_chains", make)


def _final_buckets_of_its_own() -> None:
    def make(keep: Any) -> Any:
        """Wrap `keep`."""
        return lambda self, final, valid: keep(self, tuple(self.complete()), valid)

    patch(buckets.Buckets, "keep", make)


def _account_for_what_is_given() -> None:
    def make(receive: Any) -> Any:
        """Wrap `receive`."""

        def greedy(self: Any, lane: int, prefix: Any) -> None:
            """Receive the running sum, and account for it once more."""
            receive(self, lane, prefix)
            self.from_peers[lane] = ledger.RunningSum()

        return greedy

    patch(ledger.LaneLedger, "receive", make)


def _keep_one_copy() -> None:
    patch(shares, "assign_holders", lambda assign: lambda nodes: [parts[:1] for parts in assign(nodes)])


def _drop_parts_early() -> None:
    def make(divide: Any) -> Any:
        """Wrap `divide`."""

        def hasty(*arguments: Any, **first: Any) -> Any:
            """Divide without waiting for the other members."""
            flow = divide(*arguments, **first)
            effect = next(flow)
            while True:
                try:
                    effect = flow.send([] if isinstance(effect, GatherRows) else (yield effect))
                except StopIteration:
                    return

        return hasty

    for module in (dividing, regrouping):
        patch(module, "divide", make)


def _gather_nothing() -> None:
    patch(shares.Shares, "gathering", lambda _: lambda self: [])


def _gather_from_any_member() -> None:
    def make(gathering: Any) -> Any:
        """Wrap `gathering`."""

        def careless(self: Any) -> Any:
            """Gather everything from member 0."""
            return [dataclasses.replace(move, source=0) for move in gathering(self)]

        return careless

    patch(shares.Shares, "gathering", make)


def _join_before_the_gathering() -> None:
    patch(regrouping, "gather", lambda _: lambda shares: iter(()))


def _divide_what_is_lost() -> None:
    patch(meeting, "covers", lambda _: lambda parts, total: True)


def _drop_a_shard() -> None:
    def make(_: Any) -> Any:
        """Build the replacement."""

        def careless(task: str, hosts: Any) -> Any:
            """Return the copies without the last shard's parameters."""
            by_iteration: dict[int, Any] = {}
            for host in hosts:
                for _, copy in host.memory.all_copies_of(task) if host.memory is not None else ():
                    shards = copy.layout.workers
                    params = copy.state.params if shards == 1 else (*copy.state.params[:-1], 0)
                    by_iteration.setdefault(copy.iteration, copy._replace(state=copy.state._replace(params=params)))
            return by_iteration

        return careless

    patch(memory, "_put_together", make)


NODE_MUTANTS: dict[str, Mutant] = {
    "act_on_a_stale_epoch": Mutant("an agent obeys a command of an old epoch", _act_on_a_stale_epoch),
    "start_again": Mutant("an agent forgets its answers and the ended workers", _start_again),
    "forget_the_memory": Mutant("an agent starts without the memory of the one before", _forget_the_memory),
    "early_end_is_expected": Mutant("exit code 0 in mid-training counts as the end", _early_end_is_expected),
    "follow_no_task": Mutant("an agent does not read its tasks' memberships in the log", _follow_no_task),
    "old_parts_stay": Mutant("an agent takes parts of a torn membership into the next one", _old_parts_stay),
    "slots_are_not_counted": Mutant("an agent gives every worker the first slot", _slots_are_not_counted),
    "commits_are_summed_twice": Mutant("any report continues a sum", _commits_are_summed_twice),
    "commit_without_agreement": Mutant("a replica steps as soon as it has the sums", _commit_without_agreement),
    "throw_away_complete_sums": Mutant("a member that is behind continues without the step", _throw_away_complete_sums),
    "keep_any_bucket": Mutant("a bucket counts as final where one member has its sum", _keep_any_bucket),
    "deal_what_is_held": Mutant("survivors recompute finished micro-batches", _deal_what_is_held),
    "lanes_out_of_order": Mutant("behind a border a lane is computed backwards", _lanes_out_of_order),
    "lanes_by_another_tree": Mutant("blocks are added right to left", _lanes_by_another_tree),
    "a_border_twice": Mutant("the micro-batch at a border is in a lane twice, another not", _a_border_twice),
    "final_buckets_of_its_own": Mutant("a member keeps sums that others make again", _final_buckets_of_its_own),
    "account_for_what_is_given": Mutant("giver and taker account for a running sum", _account_for_what_is_given),
    "deal_to_the_slow": Mutant("a slow replica is dealt as much as the others", _deal_to_the_slow),
    "drop_a_shard": Mutant("a state of another layout is put together without its last shard", _drop_a_shard),
    "keep_one_copy": Mutant("a part of sharded state has one holder", _keep_one_copy),
    "drop_parts_early": Mutant("old parts are dropped before all members have their new ones", _drop_parts_early),
    "gather_nothing": Mutant("a replica commits with its own parameters only", _gather_nothing),
    "gather_from_any_member": Mutant("parameters come from a member that has not stepped", _gather_from_any_member),
    "join_before_the_gathering": Mutant(
        "a member that could not step continues with old parameters", _join_before_the_gathering
    ),
    "divide_what_is_lost": Mutant("a part without a holder goes unnoticed", _divide_what_is_lost),
}
