"""The training lifecycle of one member: a generator without IO; the hook and the simulator drive the same one.

    flow = run(MemberState(launch, buckets, clock))
    effect = next(flow)
    while True:
        try:
            result = do(effect)                       # blocking, or under virtual time
        except (GroupBroken, MembershipSuperseded, RendezvousTimedOut, QuitRequested) as failure:
            effect = flow.throw(failure)
        else:
            effect = flow.send(result)

The flow asks for effects (`effects.py`); its driver carries them out and sends their results, or throws what went
wrong. `driver.py` does so in a training process, blocking; the simulator does so under virtual time. Two effects are
*seams*, the training loop's own turn: `Compute` (its micro-batches) and `Optimize` (the optimizer's step). A loop of
one's own gets them from `hook.steps()`; an adapter inside another framework's loop asks its driver what is next and
answers when its framework has done it. Per micro-batch the flow is not asked: that is between driver and loop.

Rules
-----
* An iteration: micro-batches are assigned, computed, accumulated; *computed* when this replica's are all done;
  *reduced* when every bucket's sum and every replica's account are here; *agreed* when all members have said so;
  *committed* when the loop comes back from the optimizer's step. Only then is the accumulation cleared.
* Between micro-batches and in every wait, an urgent membership sends the worker to the next group, with its model,
  optimizer and accumulation; the verdict there (`verdict.py`) says how the iteration goes on.
* A planned membership is followed at the boundary after an agreement that showed every member holding it.
* The *leader* is the first member: it reports commits, writes checkpoints, and says when the task is complete. Every
  member keeps the newest commit, so that a new leader can report what the old one took with it.
* After the last iteration no member leaves before the leader has saved: if it dies, another does it.
* With sharded optimizer state (`optimizer_state.py`) an iteration is committed when every replica's parameters have been
  gathered, each from one that has stepped it; a group that breaks before that gathers again in the next. A new group
  begins with that, then gives state to members without any, then divides the parts anew. A member that leaves as
  planned leaves its parts with those that stay.

States, and what follows (`table.py`; each flow below says which it enters)
-----
| state | what happens | then |
|---|---|---|
| new | | regrouping |
| regrouping | memberships are followed until a group has exchanged positions (`membership_choice.py`) | transferring; computing; stepping, gathering (with what it has: step first); ending (none left); parked, stranded |
| transferring | parameters, state, parts for the members of the new group (`regrouping.py`, `finding.py`) | computing; ending; regrouping |
| computing | the loop computes its micro-batches | reducing; regrouping; ending (the program left) |
| reducing | sums and accounts over the members (`iteration.py`) | agreeing; regrouping |
| agreeing | all say that they have them | stepping; regrouping |
| stepping | the loop steps its optimizer | gathering (sharded); committing |
| gathering | parameters that others have stepped (`boundary.py`) | committing; regrouping |
| committing | reported, saved, and on to the next iteration | computing; transferring (left by the last verdict); regrouping; ending |
| ending | the last state is saved, all leave together (`completion.py`) | over; regrouping |
| parked | not named by the membership; waits to be ended | |
| stranded | no membership came in time; saves and ends | |
| over | | |

Any state but parked, stranded and over goes to regrouping when the group breaks or is superseded, but for stepping (the
loop's own) and committing's first half, which needs no group.
"""  # noqa: E501  # a table

from unicrond.agents.trainer.lifecycle.boundary import commit, gather_parameters
from unicrond.agents.trainer.lifecycle.completion import complete, leave_after_stop
from unicrond.agents.trainer.lifecycle.effects import Flow, Optimize, SetPhase
from unicrond.agents.trainer.lifecycle.iteration import iterate
from unicrond.agents.trainer.lifecycle.member_state import MemberState
from unicrond.agents.trainer.lifecycle.regrouping import regroup
from unicrond.agents.trainer.lifecycle.results import ProgramLeftLoop

__all__ = ["MemberState", "run"]


def run(member: MemberState) -> Flow[None]:
    """Run from the first membership to the end of training, or of this member's part in it."""
    has_left = False
    try:
        yield from _train(member)
        yield from SetPhase("done")
    except ProgramLeftLoop:
        has_left = True
    if has_left:
        yield from leave_after_stop(member)
    member.enter("over")


def _train(member: MemberState) -> Flow[None]:
    yield from regroup(member)
    is_complete = False
    while not is_complete:
        while member.is_training:
            loss = yield from iterate(member)
            member.enter("stepping")
            yield from Optimize(member.ledger.iteration, loss)
            if (yield from gather_parameters(member)):
                yield from commit(member)
        is_complete = yield from complete(member)
