"""Word lists of `tests/house.py`: what is no name of a thing, and what a docstring begins with."""

# ruff: noqa: SIM905

from __future__ import annotations

#: Participles and pronouns: a name says what the thing is.
NOT_NOUNS = frozenset(
    """
    all another anybody anyone anything asked awaited begun both brought caught chosen come counted dealt
    dismissed done drawn driven due each everybody everyone everything fallen felt foretold forgotten found
    given gone got granted grown heard heeded held here hidden himself however itself kept kept_back known laid
    led left lost made meant meanwhile measured met mine moved named nobody none nothing noticed obeyed one ones
    other others ours outlived owed own paid passed played put read ripe run said same sat seen sent shown so
    sold somebody someone something sought spared spent spoken stood stopped struck such taken taught theirs
    themselves there thought thrown thus told torn tried understood used wanted what whatever which who whom
    whose why woken won worn written
    """.split()
)

#: Words that begin a fragment and no sentence.
FRAGMENTS = frozenset(
    """
    another as by for from how in it its none not nothing of on others our that those to until what when where
    whether which who whom whose why with
    """.split()
)

#: Verbs that docstrings may begin with.
VERBS = frozenset(
    """
    abandon abort accept acknowledge acquire add admit adopt advance align allocate allow amend announce answer
    anticipate append apply approve archive arm arrange ask assert assign attach authenticate authorize average
    avoid await back balance ban become begin bind block bound bring broadcast build bump cache calculate call
    cancel cap capture carry categorise center chain charge chart check choose claim clamp classify clean clear
    clip clone close coalesce collect color colour combine commit compare compile complete compute concatenate
    confirm connect construct consume contain continue convert copy correct count cover create crop cross cut
    deal decide declare decline decode deduce deduct defer define degrade delay delegate delete deliver demand
    deny depose derive describe destroy detach detect determine differ disable discard disconnect dispatch
    display distribute divide double downgrade drain draw drop dump echo elect embed emit enable encode end
    enforce enqueue enrol enroll ensure enter enumerate erase erode escape establish estimate evacuate evaluate
    evict examine exchange exclude execute exit expand expect expire explain explode export extend extract fail
    feed fence fetch fill filter find finish fire flatten flip flush focus fold follow forge forget fork form
    format forward free freeze gather gauge generate get give go grant group grow guard guess halt handle hash
    have heal hide hint hold host hurry identify ignore implement import include increase indicate infer inform
    inherit initialise initialize inject insert inspect install integrate intercept interpret invert invoke
    isolate issue iterate join judge keep key kill label last launch lay lead learn leave let lift limit link
    list listen load locate lock log look lower maintain make manage map mark mask match measure meet merge
    migrate mint mirror mock modify mount move multiply mutate name negotiate nest normalize note notify number
    observe obtain occupy offer omit open operate order override own pack pad page paint park parse partition
    pass patch pause perform permit pick pin place plan play plot point poll pool pop populate post predict
    preload prepare present preserve price print process produce project probe promise propose protect prove provide
    prune publish pull purge push put quantise queue quit quote race raise rank reach read readmit reap rearm
    reason rebase rebuild receive recognise recompute reconcile reconnect record recover recycle redirect reduce
    refer refill reflect refresh refuse register regroup rehash reject relay release reload relocate remember
    remind remove rename render renew reorder repair repartition repay repeat replace replay reply report
    request require reset reshape reshard resize resolve respond restart restore resume retain retire retract
    retrieve retry return reuse revert revoke rewrite roll rotate round route run sample sanitise save say scale
    scan schedule score seal search seat seed select send separate serialize serve set settle shade shape shard
    share shift shorten show shrink shut sign signal silence simulate sit size skip sleep slice smooth solve
    sort spawn speak split spread square stage stamp stand start state step stop store stream strike strip
    subclass submit subscribe substitute subtract suggest sum supersede supervise supply survive suspect suspend
    swap switch sync tag take tally tear tell terminate test throw tie time toggle touch trace track train
    transfer transform translate trigger trim trust try tune turn twist type undo unfold union unlink unmask
    unpack unregister unseal unset unwrap update upgrade upload use validate vary verify visit vote wait wake
    walk warn watch weigh wipe wire withdraw work wrap write yield zero zip
    """.split()
)
