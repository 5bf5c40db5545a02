"""Deliberate bugs, one at a time: does the fuzzer see them? `make mutants` prints the table.

Each mutant patches a running process (never a file), so it is applied in processes of its own. One that survives
says that a rule or a fault is missing in the simulation, or that a second defence makes the first unnecessary.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from msgspec.structs import replace

from agents import commit_sums, core
from agents.handling import exits, orders, starting
from agents.namesakes import Namesakes
from agents.state import Memory
from agents.trainer import dealing, regrouping
from agents.trainer.lifecycle import groups, iteration, joining, sharded, shares
from agents.trainer.lifecycle.effects import Pending, Rows
from events import vocabulary as v
from replay.simulation.log_client import Endpoint
from replay.simulation.log_server import LogServer
from replay.simulation.run import Outcome
from replay.simulation.seeds import cores, outcomes
from unicrond import admission, blame, coordinator, fold, isolation, reconcile, state
from unicrond.deciding import copies, memberships, readmission, staff
from unicrond.deciding.batch import Batch
from unicrond.folding import changes, deadlines, incidents, strikes, suspicions
from unicrond.state import NodeStatus

SEEDS = 1000


class Mutant(NamedTuple):
    """`what`: the bug in words. `apply`: plant it in this process."""

    what: str
    apply: Callable[[], None]


def _patch(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace `owner.name` by what `make` makes of it."""
    setattr(owner, name, make(getattr(owner, name)))


def _patch_fold(event: type, make: Callable[[Any], Any]) -> None:
    fold.FOLDS[event] = make(fold.FOLDS[event])


# --- the coordinator -----------------------------------------------------------------------------


def _drop_the_hold() -> None:
    def make(append: Any) -> Any:
        async def without_hold(self: Any, events: Any) -> None:
            await append(self, events)
            self._hold_seq = 0

        return without_hold

    _patch(coordinator.Coordinator, "_append", make)


def _skip_the_fence() -> None:
    def make(append: Any) -> Any:
        async def unfenced(self: Any, envelopes: Any, *, fence: Any = None) -> Any:
            return await append(self, envelopes)

        return unfenced

    _patch(Endpoint, "append", make)


def _rule_in_another_name() -> None:
    def make(require_sound_state: Any) -> Any:
        def deaf(self: Any) -> None:
            require_sound_state(self)
            self._fence = self._fence._replace(term=max(self._fence.term, self.state.term))

        return deaf

    _patch(coordinator.Coordinator, "_require_sound_state", make)


# --- the fold ------------------------------------------------------------------------------------


def _forget_repetitions() -> None:
    original = fold.fold

    def forgetful(before: state.ClusterState, entry: Any) -> state.ClusterState:
        return original(replace(before, seen={}), entry)

    _patch(fold, "fold", lambda _: forgetful)
    _patch(coordinator, "fold", lambda _: forgetful)


def _fold_what_must_not_be() -> None:
    _patch(admission, "problem", lambda _: lambda before, event: "")
    _patch(fold, "newly_broken", lambda _: lambda before, after, event: "")


def _believe_any_claim() -> None:
    _patch(admission, "from_the_future", lambda _: lambda before, envelope: "")


def _skip_the_symptom_merge() -> None:
    _patch(incidents, "blame", lambda _: incidents.open_incident)


def _blame_the_peers() -> None:
    def make(judge: Any) -> Any:
        def other_ends(found: Any, record: Any, quality: Any) -> Any:
            guilty = judge(found, record, quality).blamed
            peers = tuple(sorted({node for link in found for node in link} - {*guilty}))
            return blame.Verdict(peers, peers)

        return other_ends

    _patch(blame, "judge", make)


def _forget_lost_workers() -> None:
    def make(node_lost: Any) -> Any:
        def forgetful(before: Any, event: Any, envelope: Any) -> Any:
            after = node_lost(before, event, envelope)
            for task in after.tasks.values():
                gone = [worker.worker for worker in task.workers.values() if worker.node == event.node]
                after = changes.with_task(after, changes.without_workers(task, gone))
            return after

        return forgetful

    _patch_fold(v.NodeLost, make)


def _believe_no_stop() -> None:
    _patch_fold(v.CommandApplied, lambda _: lambda before, event, envelope: before)


def _fold_by_the_machine() -> None:
    def make(worker_ready: Any) -> Any:
        def unsteady(before: Any, event: Any, envelope: Any) -> Any:
            after = worker_ready(before, event, envelope)
            return replace(after, inert=time.perf_counter_ns())

        return unsteady

    _patch_fold(v.WorkerReady, make)


# --- decide --------------------------------------------------------------------------------------


def _reuse_a_generation() -> None:
    def make(set_membership: Any) -> Any:
        def reusing(batch: Any, task: Any, members: Any, **how: Any) -> None:
            if task.generation:
                task = replace(task, membership=replace(task.membership, generation=task.generation - 1))
            set_membership(batch, task, members, **how)

        return reusing

    _patch(memberships, "set_membership", make)


def _command_in_new_words() -> None:
    _patch(Batch, "add", lambda _: lambda self, event: self.events.append(event))


def _double_start() -> None:
    def make(staff: Any) -> Any:
        def twice(batch: Any, task: Any, policy: Any) -> None:
            staff(batch, task, policy)
            batch.occupied.clear()
            numbers = replace(task.numbers, next_worker=task.numbers.next_worker + 8)
            staff(batch, replace(task, numbers=numbers), policy)

        return twice

    _patch(staff, "staff", make)


def _plan_with_isolated_nodes() -> None:
    def make(_: Any) -> Any:
        return property(lambda self: self.status is not NodeStatus.LEFT)

    _patch(state.Node, "schedulable", make)


def _keep_broken_replicas() -> None:
    def make(living_members: Any) -> Any:
        return lambda task: task.membership.members if task.membership else ()

    _patch(reconcile, "living_members", make)


def _start_on_cordoned_nodes() -> None:
    def make(has_room: Any) -> Any:
        def anywhere(batch: Any, nodes: Any) -> bool:
            known = {name: replace(node, cordoned=False) for name, node in batch.state.nodes.items()}
            room = SimpleNamespace(state=replace(batch.state, nodes=known), occupied=batch.occupied)
            return bool(has_room(room, nodes))

        return anywhere

    in_service = property(lambda self: self.status is NodeStatus.UP and not self.isolated)
    _patch(state.Node, "schedulable", lambda _: in_service)
    _patch(reconcile, "schedulable", lambda schedulable: lambda nodes: (schedulable(nodes)[0], []))
    _patch(Batch, "has_room", make)


def _judge_nobody() -> None:
    _patch_fold(v.HangSuspected, lambda _: lambda before, event, envelope: before)


def _need_all_reports() -> None:
    def make(judge: Any) -> Any:
        def patient(task: Any, generation: int = 0) -> Any:
            members = task.membership.members if task.membership else ()
            return judge(task, generation) if all(one.worker in task.group.suspicions for one in members) else None

        return patient

    _patch(suspicions, "judge", make)


def _end_all_who_are_late() -> None:
    def make(_: Any) -> Any:
        def harsh(before: Any, task: Any, observed_at_us: int) -> Any:
            for worker in task.workers.values():
                if worker.alive and deadlines._is_late(task, worker):
                    before = strikes.give_up(before, task.name, worker, "hang", "is late", observed_at_us)
            return before

        return harsh

    _patch(deadlines, "_not_met", make)


def _order_again() -> None:
    _patch_fold(v.InjectFault, lambda _: lambda before, event, envelope: before)


def _keep_for_ever() -> None:
    _patch(copies, "drop_state", lambda _: lambda batch, task: None)


def _share_a_name() -> None:
    _patch(Namesakes, "heard", lambda _: lambda names, boot, now_s: None)


def _tell_no_peers() -> None:
    _patch(copies, "tell_peers", lambda _: lambda batch, task: None)


def _hurry_a_handover() -> None:
    def make(reshape: Any) -> Any:
        def at_once(batch: Any, task: Any, asked: Any) -> None:
            reshape(batch, task, asked)
            for worker in task.leavers:
                batch.stop(task, worker, "hurry")

        return at_once

    _patch(memberships, "reshape", make)


def _readmit_unchecked() -> None:
    def make(phase: Any) -> Any:
        def trusting(known: Any, node: Any) -> Any:
            now = phase(known, node)
            return isolation.Phase.CLEARED if now is isolation.Phase.TO_CHECK else now

        return trusting

    _patch(isolation, "phase", make)


def _believe_any_check() -> None:
    _patch_fold(v.NodeChecked, lambda fold: lambda before, event, env: fold(before, replace(event, passed=True), env))


def _check_what_needs_hands() -> None:
    _patch(isolation, "needs_hands", lambda _: lambda node: False)


def _never_check() -> None:
    _patch(readmission, "_check", lambda _: lambda batch, node: None)


def _no_deadlines() -> None:
    _patch(coordinator, "deadlines", lambda _: lambda survey: {})


# --- the agent -----------------------------------------------------------------------------------


def _act_on_a_stale_epoch() -> None:
    def make(commanded: Any) -> Any:
        def unfenced(turn: Any, given: Any) -> None:
            if (given.term, given.command.epoch) < turn.memory.fence:
                # All that would recognise it has to go: the fence is not the only defence.
                turn.remember(fence=(0, 0), answered={}, gone={})
            commanded(turn, given)

        return unfenced

    _patch(orders, "commanded", make)


def _start_again() -> None:
    def make(commanded: Any) -> Any:
        def forgetful(turn: Any, given: Any) -> None:
            turn.remember(answered={}, gone={})
            commanded(turn, given)

        return forgetful

    _patch(orders, "commanded", make)


def _forget_the_memory() -> None:
    _patch(core, "resume", lambda resume: lambda config, memory: resume(config, Memory()))


def _early_end_is_expected() -> None:
    _patch(exits, "left_early", lambda _: lambda record, mark: False)


def _slots_are_not_counted() -> None:
    _patch(starting, "free_slots", lambda _: lambda turn: list(range(turn.config.slots)))


def _commits_are_summed_twice() -> None:
    _patch(commit_sums, "continues", lambda _: lambda before, worker, commit: before.worker == worker)


# --- the trainer ---------------------------------------------------------------------------------


def _commit_without_agreement() -> None:
    def make(agree: Any) -> Any:
        def hasty(books: Any) -> Any:
            if books.shares is not None:  # there the agreement also says what is saved
                yield from agree(books)
            else:
                books.enter("agreeing")
                books.target = yield from Pending()

        return hasty

    _patch(iteration, "_agree", make)


def _throw_away_complete_sums() -> None:
    def make(judge: Any) -> Any:
        def hasty(*positions: Any, **whole: Any) -> Any:
            return dataclasses.replace(judge(*positions, **whole), step_first=frozenset())

        return hasty

    _patch(regrouping, "judge", make)


def _keep_any_bucket() -> None:
    def make(judge: Any) -> Any:
        def generous(positions: Any, micro_batches: int, **whole: Any) -> Any:
            verdict = judge(positions, micro_batches, **whole)
            anybody = [bucket for position in positions if position.has_state for bucket in position.complete]
            final = frozenset() if verdict.step_first else frozenset(anybody)
            return dataclasses.replace(verdict, final=final)

        return generous

    _patch(regrouping, "judge", make)


def _deal_what_is_held() -> None:
    def make(deal: Any) -> Any:
        return lambda held, micro_batches: deal([()] * len(held), micro_batches)

    _patch(regrouping, "deal", make)
    _patch(dealing, "deal", make)


def _keep_one_copy() -> None:
    _patch(shares, "placed", lambda placed: lambda nodes: [parts[:1] for parts in placed(nodes)])


def _drop_parts_early() -> None:
    def make(divide: Any) -> Any:
        def hasty(*arguments: Any, **first: Any) -> Any:
            flow = divide(*arguments, **first)
            effect = next(flow)
            while True:
                try:
                    effect = flow.send([] if isinstance(effect, Rows) else (yield effect))
                except StopIteration:
                    return

        return hasty

    for module in (sharded, groups):
        _patch(module, "divide", make)


def _gather_nothing() -> None:
    _patch(shares.Shares, "gathering", lambda _: lambda self: [])


def _gather_from_anybody() -> None:
    def make(gathering: Any) -> Any:
        def careless(self: Any) -> Any:
            return [dataclasses.replace(move, source=0) for move in gathering(self)]

        return careless

    _patch(shares.Shares, "gathering", make)


def _join_before_the_gathering() -> None:
    _patch(groups, "gather", lambda _: lambda shares: iter(()))


def _divide_what_is_lost() -> None:
    _patch(joining, "covers", lambda _: lambda held, total: True)


# --- the log -------------------------------------------------------------------------------------


def _acknowledge_before_the_disk() -> None:
    def make(_: Any) -> Any:
        return lambda self, say: say()

    _patch(LogServer, "_when_durable", make)


def _take_a_claim_for_another() -> None:
    def make(claim: Any) -> Any:
        def by_id(self: Any, envelope: Any, reply: Any) -> None:
            newest = self._claims[-1].envelope if self._claims else envelope
            claim(self, newest if newest.event_id == envelope.event_id else envelope, reply)

        return by_id

    _patch(LogServer, "claim", make)


MUTANTS: dict[str, Mutant] = {
    "drop_the_hold": Mutant("the coordinator decides before it has read its own events", _drop_the_hold),
    "skip_the_fence": Mutant("appends carry no fence", _skip_the_fence),
    "rule_in_another_name": Mutant("an old coordinator reads of a newer term and goes on", _rule_in_another_name),
    "forget_repetitions": Mutant("the fold takes a repeated event for a new one", _forget_repetitions),
    "fold_what_must_not_be": Mutant("the fold takes in what breaks the state", _fold_what_must_not_be),
    "believe_any_claim": Mutant("a claim of any term counts, under any boot", _believe_any_claim),
    "skip_the_symptom_merge": Mutant("every symptom is an incident of its own", _skip_the_symptom_merge),
    "blame_the_peers": Mutant("of a broken link the wrong end is given up", _blame_the_peers),
    "forget_lost_workers": Mutant("the workers of a lost node are forgotten", _forget_lost_workers),
    "believe_no_stop": Mutant("the answer to a stop changes nothing", _believe_no_stop),
    "fold_by_the_machine": Mutant("the fold reads a clock", _fold_by_the_machine),
    "reuse_a_generation": Mutant("a membership gets the number of the one before", _reuse_a_generation),
    "double_start": Mutant("missing workers are started twice", _double_start),
    "plan_with_isolated_nodes": Mutant("lost and isolated nodes are planned with", _plan_with_isolated_nodes),
    "keep_broken_replicas": Mutant("dead members stay members", _keep_broken_replicas),
    "command_in_new_words": Mutant("every node is commanded as if its agent were of today", _command_in_new_words),
    "start_on_cordoned_nodes": Mutant("cordoned nodes get workers", _start_on_cordoned_nodes),
    "judge_nobody": Mutant("no hang is ever found", _judge_nobody),
    "need_all_reports": Mutant("nobody hangs before all members were told of", _need_all_reports),
    "end_all_who_are_late": Mutant("who waits for a meeting is ended with who is awaited", _end_all_who_are_late),
    "order_again": Mutant("an ordered fault is commanded again and again", _order_again),
    "keep_for_ever": Mutant("states of ended tasks stay in memory", _keep_for_ever),
    "share_a_name": Mutant("an agent does not mind a newer one of its name", _share_a_name),
    "tell_no_peers": Mutant("copies of states go where they went before nodes came or left", _tell_no_peers),
    "hurry_a_handover": Mutant("who hands its state over is stopped at once", _hurry_a_handover),
    "readmit_unchecked": Mutant("an isolated node is taken back unchecked", _readmit_unchecked),
    "believe_any_check": Mutant("a failed health check is taken for a passed one", _believe_any_check),
    "check_what_needs_hands": Mutant("what needs a reboot is taken back by a check alone", _check_what_needs_hands),
    "never_check": Mutant("no health check is ever asked for", _never_check),
    "no_deadlines": Mutant("no deadline ever passes", _no_deadlines),
    "act_on_a_stale_epoch": Mutant("an agent takes a command of an old epoch for a new one", _act_on_a_stale_epoch),
    "start_again": Mutant("an agent forgets what it has answered and who has ended", _start_again),
    "forget_the_memory": Mutant("an agent starts without the memory of the one before", _forget_the_memory),
    "early_end_is_expected": Mutant("exit code 0 in mid-training is as good as the end", _early_end_is_expected),
    "slots_are_not_counted": Mutant("an agent gives every worker the first slot", _slots_are_not_counted),
    "commits_are_summed_twice": Mutant("a sum is continued by whatever comes", _commits_are_summed_twice),
    "commit_without_agreement": Mutant("a replica steps as soon as it has the sums", _commit_without_agreement),
    "throw_away_complete_sums": Mutant("who is behind does not step before it goes on", _throw_away_complete_sums),
    "keep_any_bucket": Mutant("a bucket counts as final where one member has its sum", _keep_any_bucket),
    "deal_what_is_held": Mutant("survivors are dealt what they have computed already", _deal_what_is_held),
    "keep_one_copy": Mutant("a part of sharded state has one holder", _keep_one_copy),
    "drop_parts_early": Mutant("old parts are dropped before all members have their new ones", _drop_parts_early),
    "gather_nothing": Mutant("an iteration is committed with the parameters that were stepped here", _gather_nothing),
    "gather_from_anybody": Mutant("parameters are taken from a member that has not stepped them", _gather_from_anybody),
    "join_before_the_gathering": Mutant(
        "who could not step goes on without what was stepped", _join_before_the_gathering
    ),
    "divide_what_is_lost": Mutant("a part that no member holds is not missed", _divide_what_is_lost),
    "take_a_claim_for_another": Mutant("the log knows a claim by its id alone", _take_a_claim_for_another),
    "acknowledge_before_the_disk": Mutant("the log acknowledges what a crash can lose", _acknowledge_before_the_disk),
}


def caught(name: str, seeds: Sequence[int], processes: int) -> tuple[Outcome | None, int]:
    """The first outcome in which a rule was broken, and how many seeds were played until then."""
    for played, outcome in enumerate(outcomes(seeds, processes, name), start=1):
        if outcome.rule:
            return outcome, played
    return None, len(seeds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; exit code 1 if a mutant survives."""
    parser = argparse.ArgumentParser(prog="python -m replay.simulation.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="MUTANT", help=f"default: all of {', '.join(MUTANTS)}")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--processes", type=int, default=cores())
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in MUTANTS]:
        parser.error(f"no mutant {unknown[0]!r}; known: {', '.join(MUTANTS)}")
    survivors = 0
    print(f"{'mutant':28} {'caught by':28} {'seeds':>5}  what it is")
    for name in options.names or MUTANTS:
        outcome, played = caught(name, range(options.seeds), options.processes)
        survivors += outcome is None
        print(f"{name:28} {outcome.rule if outcome else 'NOT CAUGHT':28} {played:5}  {MUTANTS[name].what}", flush=True)
    print(f"{survivors} survived" if survivors else "all caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
