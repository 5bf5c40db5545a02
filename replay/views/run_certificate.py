"""What a log proves of a task's training: every sample once, no iteration under two memberships, states that continue.
Pure.

Rules
-----
* Read are the entries about the task: how it was submitted, its memberships, committed iterations, states that were
  loaded. A later submission of the name is another run; the last one counts.
* Iterations follow each other. One that was committed before is committed again only after a state before it was loaded
  (all replicas were lost), or in the next group, whose lead did not know that the last of them had been told.
* Each entry's samples are as many as its iterations have, and with the size of the data set their digest is that of the
  samples which the seed draws for these iterations: none is lost, doubled or another.
* An iteration is committed by a group that was decided for the task, and no older group commits after a newer one.
* Checksums of the parameters after one iteration are equal wherever the log has several.
* The *chain*: each of these entries is hashed with what came before. Its last link, kept elsewhere, says later whether
  the log still is that log: a changed, lost or added entry changes it and all links behind it. Clocks, durations and
  nodes are not in it: it is the training's.

What this does not prove: that the sums of gradients are those of the program, which takes a recomputation; and nothing
of what a forger wrote who also keeps the last link.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from unicrond.agents.protocol.sampling import DIGEST_MODULUS, Sampling, samples_digest
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary import TaskSpec
from unicrond.events.wire.envelope import Entry, RecordedEvent

#: Iterations from one link that is kept to the next.
MARK_EVERY = 1000
#: Findings that are told one by one.
FINDINGS_MAX = 50
#: Commits that are remembered for what the next lead may tell again.
_COMMITS_MAX = 64


class UnprovenStep(NamedTuple):
    """A step of the run that the log does not prove. `seq`: the entry."""

    seq: int
    iteration: int
    text: str


@dataclass(slots=True)
class RunCertificate:
    """The proof of one run of `task`, as far as its log was read. `dataset_size`: in samples, 0 for a stream; None: not
    known, and samples are counted alone. `kept_links`: of a certificate made before, (iteration, link) in rising
    iterations; `link_matches`: those of them that this log's chain has, too. `marks`: its own, now and then."""

    task: str
    dataset_size: int | None = None
    kept_links: tuple[tuple[int, str], ...] = ()
    link_matches: set[tuple[int, str]] = field(default_factory=set)
    spec: TaskSpec | None = None
    seq: int = 0
    last: int = 0
    iterations: int = 0
    samples: int = 0
    link: str = ""
    marks: list[tuple[int, str]] = field(default_factory=list)
    findings: list[UnprovenStep] = field(default_factory=list)
    findings_count: int = 0
    returns: int = 0
    _generation: int = 0
    _decided: set[int] = field(default_factory=set)
    _loaded: set[int] = field(default_factory=set)
    _parameters: dict[int, int] = field(default_factory=dict)
    #: The newest: (first, last) -> digest of the samples, loss.
    _commits: dict[tuple[int, int], tuple[int, float]] = field(default_factory=dict)

    @property
    def is_proven(self) -> bool:
        """Return whether nothing speaks against it, of one committed iteration at least."""
        return bool(self.iterations) and not self.findings_count and self.parting is None

    @property
    def links(self) -> tuple[tuple[int, str], ...]:
        """Return the links that a certificate keeps, in rising iterations: the marks, and the last."""
        return (*self.marks, (self.last, self.link))

    @property
    def parting(self) -> tuple[int, int] | None:
        """Return between which iterations this chain has left that of the kept links; None where it has not."""
        certain = 0
        for iteration, link in self.kept_links:
            if (iteration, link) not in self.link_matches:
                return certain, iteration
            certain = iteration
        return None

    def add(self, entry: Entry) -> None:
        """Add the log's next entry."""
        if not isinstance(entry, RecordedEvent):
            return
        match entry.envelope.event:
            case v.TaskSubmitted(spec=spec) if spec.name == self.task:
                self._begin(entry.seq, spec)
            case v.TaskReshaped(task=self.task) as event:
                self._chain(entry.seq, "reshaped", event.tp, event.pp, event.cp, event.ep, event.micro_batch)
            case v.MembershipDecided(task=self.task, generation=generation):
                self._decided.add(generation)
            case v.StateLoaded(task=self.task) as event:
                if event.source not in ("own", "replica"):
                    self._loaded.add(event.iteration)
                    self._chain(entry.seq, "loaded", event.iteration)
            case v.StepCommitted(task=self.task) as event:
                self._commit(entry.seq, event)
            case _:
                pass

    def _begin(self, seq: int, spec: TaskSpec) -> None:
        self.spec, self.last, self.iterations, self.samples, self.returns = spec, 0, 0, 0, 0
        self.link, self.marks, self.findings, self.findings_count = "", [], [], 0
        self._generation, self._decided, self._loaded, self._parameters, self._commits = 0, set(), set(), {}, {}
        self._chain(seq, "submitted", spec.name, spec.seed, spec.global_batch, spec.micro_batch, spec.iterations)

    def _commit(self, seq: int, event: v.StepCommitted) -> None:
        is_repeat = self.last and event.first <= self.last and event.first - 1 not in self._loaded
        if is_repeat and event.last <= self.last and event.generation >= self._generation:
            self._repeat(seq, event)
            return
        self._continue(seq, event)
        if event.generation not in self._decided:
            self._find(seq, event.first, f"generation {event.generation} was never decided")
        elif event.generation < self._generation:
            self._find(seq, event.first, f"generation {event.generation} after generation {self._generation}")
        self._count_samples(seq, event)
        self._compare_checksums(seq, event)
        checksums = event.checksums or v.Checksums(iteration=0, parameters=0)
        self._chain(
            seq, "committed", event.generation, event.first, event.last, event.samples, event.samples_digest,
            event.loss.hex(), checksums.iteration, checksums.parameters, checksums.sums,
        )  # fmt: skip
        if event.last // MARK_EVERY > self.last // MARK_EVERY:  # after a return once more
            self.marks = [*(mark for mark in self.marks if mark[0] < event.last), (event.last, self.link)]
        self.iterations += event.last - max(event.first - 1, self.last if is_repeat else 0)
        self.samples += event.samples
        self.last, self._generation = event.last, max(event.generation, self._generation)
        self._loaded.clear()
        self._commits[event.first, event.last] = event.samples_digest, event.loss
        if len(self._commits) > _COMMITS_MAX:
            del self._commits[next(iter(self._commits))]

    def _repeat(self, seq: int, event: v.StepCommitted) -> None:
        """Compare what the next lead tells once more, which is no training, with what was told."""
        values = event.samples_digest, event.loss
        if self._commits.get((event.first, event.last), values) != values:
            self._find(seq, event.first, "told once more, with other samples or another loss")
        self._count_samples(seq, event)
        self._compare_checksums(seq, event)

    def _continue(self, seq: int, event: v.StepCommitted) -> None:
        """Look whether the iterations follow those before."""
        begin = event.first - 1
        if begin in self._loaded and (begin < self.last or not self.iterations):
            self.returns += bool(self.iterations)
            return
        if begin == self.last:
            return
        if begin > self.last:
            span = f"iterations {self.last + 1} to {begin}" if begin > self.last + 1 else f"iteration {begin}"
            self._find(seq, self.last + 1, f"{span}: in no entry of the log (of the second before a lead's node died?)")
        elif event.generation <= self._generation or begin < self.last - 1:
            self._find(seq, event.first, f"iteration {event.first} is committed twice, and no earlier state was loaded")

    def _count_samples(self, seq: int, event: v.StepCommitted) -> None:
        spec = self.spec
        if spec is None:
            return
        count = spec.global_batch * (event.last - event.first + 1)
        if event.samples != count:
            self._find(seq, event.first, f"{event.samples} samples instead of {count}")
        elif self.dataset_size is not None and event.samples_digest != self._digest(spec, event.first, event.last):
            self._find(
                seq, event.first, "samples that the seed does not draw for these iterations, or one of them twice"
            )

    def _digest(self, spec: TaskSpec, first: int, last: int) -> int:
        sampling = Sampling(spec.seed, spec.global_batch, spec.global_batch, self.dataset_size or None)
        digests = (samples_digest(iteration, sampling.samples(iteration, 0)) for iteration in range(first, last + 1))
        return sum(digests) % DIGEST_MODULUS

    def _compare_checksums(self, seq: int, event: v.StepCommitted) -> None:
        if event.checksums is None or not event.checksums.parameters:
            return
        iteration, parameters = event.checksums.iteration, event.checksums.parameters
        if self._parameters.setdefault(iteration, parameters) != parameters:
            self._find(seq, iteration, "other parameters than the log had for it before")

    def _find(self, seq: int, iteration: int, text: str) -> None:
        self.findings_count += 1
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(UnprovenStep(seq, iteration, text))

    def _chain(self, seq: int, *words: str | int) -> None:
        self.seq = seq
        self.link = blake2b(json.dumps([self.link, *words]).encode(), digest_size=32).hexdigest()
        last = words[3] if words[0] == "committed" else self.last
        if (last, self.link) in self.kept_links:
            self.link_matches.add((int(last), self.link))
