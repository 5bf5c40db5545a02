"""What a task is made of, one value per subject. Frozen; made by the fold alone; `state.Task` holds one of each.

| value | what it holds | changed by |
|---|---|---|
| `Numbers` | what the next worker and the next replica are called | folding/commands.py |
| `TaskProgress` | what has been committed and saved | folding/training.py |
| `Pace` | how long iterations and transitions take, and what throughput follows | folding/training.py, plans.py |
| `GroupHealth` | how the newest membership fares: meetings, suspicions, stragglers | folding/plans.py, suspicions.py |
| `Troubles` | what is held against nodes and against the task itself | folding/failure_counts.py |
| `Copies` | where its state lies in nodes' memory | folding/stored_states.py, commands.py |
| `Reshaping` | the layout that it is asked to have | folding/tasks.py |
| `StarvationState` | how long it has waited for workers, or has had them in its turn | starvation.py |
| `Ending` | why it stopped, and with which parameters | folding/tasks.py |

Each field's name is one of a kind among all of these: in bytes and in JSON a task is flat (state_bytes.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from unicrond.core.state.node_links import LinkProbing
from unicrond.core.state.workers import Membership
from unicrond.events.vocabulary import DivergenceSign, HangSuspected, MemoryService, ReplicaDeal, ReshapeRequested
from unicrond.events.vocabulary.field_defaults import always
from unicrond.events.vocabulary.placements import PartialMembership

#: How many timings of a task's iterations the state remembers, and how many of a group's first it leaves out.
TIMINGS_MAX = 15
WARM_UP = 2
#: Reports without a plain iteration, one after the other, after which they count: a task that always saves is as fast
#: as it is so.
UNPLAIN_MAX = 120
#: How many generations' leads the state remembers.
LEADS_MAX = 16
#: Iterations of one generation after which a broken connection before it is forgotten.
CALM_ITERATIONS = 10


class KeptState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The last report of a node about the task's state in its memory (see SnapshotStored)."""

    node: str
    shard: int
    iteration: int
    generation: int
    origin: str
    size_bytes: int
    shards: int = always(0)


class Straggler(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A member that takes `factor` times as long as the other replicas (see
    unicrond.events.vocabulary.StragglerObserved).
    """

    worker: str
    node: str
    factor: float
    compute_us: int
    others_us: int
    since_iteration: int
    since_us: int
    deal: ReplicaDeal | None = None


class Numbers(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The next free numbers; none is used twice, not even in the next life of the task's name."""

    next_worker: int = always(1)
    next_replica: int = always(0)


class TaskProgress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`iteration`: the last one committed; it falls back when the last replica was lost. `best_iteration` never does.

    `committed_generation`: the generation that committed it. `save_failures`: why the last checkpoint was not written,
    by whose it was (unicrond.events.vocabulary.SaveFailed); `unsaved_since_us`: since when. `trained_us`: how long all
    iterations took, by their own clock. `iterations_repeated`: committed ones that were trained again. `repeats_until`:
    up to this one the present group trains again what was committed before; 0: it does not. `repeats_for`: the kind of
    incident of the last time.
    """

    iteration: int = always(0)
    best_iteration: int = always(0)
    committed_generation: int = always(0)
    loss: float | None = always(None)
    first_loss: float | None = always(None)
    first_commit_us: int = always(0)
    last_commit_us: int = always(0)
    checkpoint_iteration: int = always(0)
    save_failures: dict[str, str] = {}
    unsaved_since_us: dict[str, int] = {}
    trained_us: int = 0
    iterations_repeated: int = 0
    repeats_until: int = 0
    repeats_for: str = ""


class Circumstances(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What stood when T was last measured at a number of workers: `flops` then, on which `nodes` (sorted), and until
    when the task ran so, `measured_us` (log time). `has_faded`: the belief has moved since, by age or because its cause
    is gone. `trials`: how often the same was measured again after that (worth/evidence.py).
    """

    flops: int
    nodes: tuple[str, ...]
    measured_us: int
    has_faded: bool = False
    trials: int = 0


class Pace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`iteration_us`: per iteration, by the last report. `timings`: by the last TIMINGS_MAX reports of the present
    generation, its first WARM_UP left out (`warm_up_reports`: how many have come), and iterations during checkpoints
    (`unplain_reports`: how many came last that had no others). `measurements`: workers -> FLOP/s
    that were measured (waf.py). `transition_us`: D_transition, a moving average over the task's transitions; 0 = none
    yet. `other_layouts`: what was measured in other layouts (`layout_key`). `reshape_us`, `move_us`: D_reshape and
    D_move, likewise, of a task that has a choice of layouts. `gpu`: the type of GPU it was measured on, "": none
    reported; `on_gpus`: what was measured on other types, by layout (gpu_types.py). `circumstances`: of the
    measurements in the present layout on the present type, by workers. `revised_us`: when a measurement of the task
    last asked for a plan. `start_us`: D_restart, what its last start took from the first command to the first group;
    `starting_since_us`: since when it starts, 0 = it does not.
    """

    iteration_us: int = always(0)
    timings: tuple[int, ...] = always(())
    warm_up_reports: int = always(0)
    unplain_reports: int = 0
    measurements: dict[str, int] = always({})
    transition_us: int = always(0)
    other_layouts: dict[str, dict[str, int]] = {}
    reshape_us: int = 0
    move_us: int = 0
    gpu: str = ""
    on_gpus: dict[str, dict[str, dict[str, int]]] = {}
    circumstances: dict[str, Circumstances] = {}
    revised_us: int = 0
    start_us: int = 0
    starting_since_us: int = 0


class Lead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first member of a generation's membership: the one that reports for all."""

    generation: int
    worker: str
    node: str


class GroupHealth(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`formed_after`: the iteration at which the newest membership was decided.

    `reattempts`: generations of the same members, one after the other, none of which has been calm (CALM_ITERATIONS).
    `meetings`: deadlines for a meeting that have passed and ended no process. `unread_generation`: the newest
    generation whose command a node could not read (folding/commands.py); 0 = none. `overdue_generation`: the newest
    generation, planned or announced by its lead, not met in time while an open incident was about others; 0 = none.
    `suspicions`: per member, the last report that it stands still in the present generation (hangs.py). `stragglers`:
    members that are slower than the other replicas, by worker. `membership_parts`: parts of the next membership, as far
    as they have come (events/vocabulary/placements.py). `lead_confirmed`: the newest group's lead has said for all that
    they are in it (MembershipDecided.leader_confirms). `last_membership`: the last membership of which a lead had said
    so, until the newest group has met. `probing`: probes of the links between its members (faults/links.py).
    `leads`: of the generations whose reports may still come, the newest LEADS_MAX (rules/authority.py). `accusations`:
    per member whose parameters differ, who has said so, and before which iteration (folding/suspicions.py).
    `divergence_reports`: per member, since which iteration it says that the program diverges, and by what sign.
    """

    formed_after: int = always(0)
    reattempts: int = always(0)
    meetings: int = 0
    unread_generation: int = 0
    suspicions: Mapping[str, HangSuspected] = always({})
    stragglers: dict[str, Straggler] = {}
    overdue_generation: int = 0
    membership_parts: PartialMembership | None = None
    lead_confirmed: bool = False
    last_membership: Membership | None = None
    probing: LinkProbing = LinkProbing()
    leads: tuple[Lead, ...] = ()
    accusations: dict[str, dict[str, int]] = {}
    divergence_reports: Mapping[str, tuple[int, DivergenceSign]] = {}


class Crashes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The faults of the task's own program since it last was calm (faults/program_faults.py).

    `count`: all; `fruitless`: those without a new iteration since the one before; `early`: ends without a word
    (`left_early`); `same_nan`: losses that were not finite in the same iteration, one after the other.
    Of the last: `text` for people, `signature`, `iteration` it came in, the `nodes` that this one came on, `tail` of
    the output, `refusals`: the nodes that have refused a start;
    `best`: the best iteration by then; workers of numbers `below`, that have joined no group after `generation`, belong
    to it. `waits`: the back-off after it is not over.
    """

    count: int = 0
    fruitless: int = 0
    early: int = 0
    same_nan: int = 0
    text: str = ""
    signature: str = ""
    iteration: int = 0
    nodes: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    tail: str = ""
    best: int = 0
    below: int = 0
    generation: int = 0
    first_us: int = 0
    last_us: int = 0
    waits: bool = False


class LocalFault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Hold what the task's program has ended by on one node alone, last `at_us` (log time; faults/local_faults.py).

    `refuted`: how often other replicas have computed something else in its place, a finite loss or other bits; 0: it
    was something else.
    """

    text: str
    at_us: int
    refuted: int = 0


class ProgramDivergence(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The program trains something else on each replica, or each time, since an iteration: by what it was seen, and
    when more than half of the replicas had said so (log time)."""

    since_iteration: int
    sign: DivergenceSign
    at_us: int

    @property
    def is_programs(self) -> bool:
        """Return whether the program is the cause, not what its replicas compute on."""
        return self.sign != "environment"


class HealingProof(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The proof that a task heals (healing_proofs.py). `worker`, `rank`: which is killed, of `generation`; "": none
    yet. `killed_iteration`: in which it has ended by the signal; `resumed_iteration`: the first that was committed
    without it; `whole_iteration`: one that all its workers have computed since; 0: none yet. `armed_us`: when their
    parameters had been compared after that; `bits`: what came of it, in words.
    """

    requested_us: int
    worker: str = ""
    rank: int = 0
    generation: int = 0
    killed_iteration: int = 0
    resumed_iteration: int = 0
    whole_iteration: int = 0
    armed_us: int = 0
    bits: str = ""


class Troubles(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`strikes`: per node, blows to the task there since it last committed a step there. Workers that end together
    are one blow; a worker that was started after it makes the next.

    Faults of the program are none of these: they stand in `crashes`. `deaths`: per node, the signature of the last end
    of unknown cause there since the last new iteration (faults/program_faults.py). `local_faults`: per node, what its
    program has ended by there alone.

    `struck_below`: per node, and "" for the task: workers of lower numbers belong to the last blow counted. `stuck`:
    blows anywhere since the task last committed a new iteration. `ends`: per node, of how many broken links it was an
    end, since the task last was calm there with others (in units of blame.py); `breaks`: how often a worker there was
    given up for that; `unclear_breaks`: how often of these another was as likely at fault. `convictions_us`: per node,
    when a replica there last was convicted of other bits, in the day before the newest. `evictions_us`: when workers
    were given up on suspicion, in the last hour (nodes/brakes.py). `divergence`: of its program, the first that was
    seen; after one of its replicas' environments that of its program. `proof`: that it heals; None: nobody has asked.
    """

    strikes: dict[str, int] = always({})
    struck_below: dict[str, int] = always({})
    stuck: int = always(0)
    ends: dict[str, int] = always({})
    breaks: dict[str, int] = always({})
    unclear_breaks: dict[str, int] = {}
    crashes: Crashes | None = None
    deaths: dict[str, str] = {}
    local_faults: dict[str, LocalFault] = {}
    convictions_us: dict[str, int] = {}
    evictions_us: tuple[int, ...] = ()
    divergence: ProgramDivergence | None = None
    proof: HealingProof | None = None

    @property
    def program_diverges(self) -> bool:
        """Return whether the program itself trains something else on each replica, or each time."""
        return self.divergence is not None and self.divergence.is_programs

    @property
    def of_nodes(self) -> bool:
        """Return whether something is held against a node."""
        return bool(self.strikes or self.ends or self.breaks)

    def names(self, node: str) -> bool:
        """Return whether workers of the task have ended, or were given up, on this node since the task last was well
        there."""
        return node in self.strikes or node in self.breaks or node in self.local_faults


NO_TROUBLES = Troubles()


class Copies(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`peers`: the nodes that take copies, as the members got them last. `carriers`: all that ever had a worker of the
    task or took copies: they may still hold a state, whatever has become of them since.

    `holdings`: by "node/shard", what nodes keep of the state in memory; they may hold newer by now.
    """

    peers: tuple[MemoryService, ...] = always(())
    holdings: Mapping[str, KeptState] = always({})
    carriers: Mapping[str, bool] = {}


class Reshaping(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`reshape`: the layout that the task is to have (reshaping.py). `reshaped_us`: when it last got another.

    `plan`: the epoch of the plan that wants it; 0: a person does. `since_us`: the last commit in the layout before,
    until the first group in the new one has met.
    """

    reshape: ReshapeRequested | None = always(None)
    reshaped_us: int = always(0)
    plan: int = 0
    since_us: int = 0


class Ending(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`reason`: why the task has its status, in words. `params_digest`: of the parameters that it ended with.

    `stop`: why its program wants it to end before its last iteration; `loop_exits`: the workers that have left the
    training loop for that, and after which iteration.
    """

    reason: str = always("")
    params_digest: str = always("")
    stop: str = ""
    loop_exits: dict[str, int] = {}


class StarvationState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Log times, 0 = not so (starvation.py). `waits_since_us`: since when no plan has given it workers. `overdue_us`:
    when that had been too long. `turn_since_us`: when the turn began that it has. `turn_over_us`: when its last one
    ended.
    """

    waits_since_us: int = 0
    overdue_us: int = 0
    turn_since_us: int = 0
    turn_over_us: int = 0
