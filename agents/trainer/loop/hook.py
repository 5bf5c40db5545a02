"""The hook: what a Megatron-core training loop calls, and all that unicrond needs of it.

    hook = Hook.attach(model, optimizer, scheduler)   # or lists of several
    for step in hook.steps():
        for micro_batch in step:                    # assigned to this replica; more of them after a peer's death
            loss_sum, tokens = forward_backward(step, micro_batch)
            step.add(loss_sum, tokens)
        optimizer.step()                            # the gradients are the global batch's mean, on every replica
        scheduler.step(...)

Rules
-----
* The lifecycle (`lifecycle/`) says what happens in which order, and what follows a fault; the driver carries it out
  (`driver.py`). This module has what a loop sees of it: iterations, micro-batches, `stop`, `section`; and what becomes
  of a program that ends before its training does.
* Buckets are reduced while the last backward still runs, where the loop allows it (`reduction.py`).
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from unicrond.agents.protocol.messages import LEFT_EARLY
from unicrond.agents.protocol.sampling import work_seed
from unicrond.agents.trainer.gradients.accumulation import Accumulation
from unicrond.agents.trainer.gradients.carried_buffers import CarriedBuffers
from unicrond.agents.trainer.lifecycle import MemberState
from unicrond.agents.trainer.lifecycle.effects import Compute, Optimize
from unicrond.agents.trainer.lifecycle.lanes import Lanes
from unicrond.agents.trainer.lifecycle.results import GroupBroken, MembershipSuperseded, ProgramLeftLoop, QuitRequested
from unicrond.agents.trainer.loop import examination
from unicrond.agents.trainer.loop.driver import LifecycleDriver, make_driver, plain_accumulation
from unicrond.agents.trainer.loop.loader import sampling_over
from unicrond.agents.trainer.loop.local import Local as Local
from unicrond.agents.trainer.loop.local import LocalHook, backward
from unicrond.agents.trainer.loop.recomputation import Recomputation
from unicrond.agents.trainer.loop.stream import DatasetLoader, make_loader
from unicrond.agents.trainer.process import context
from unicrond.agents.trainer.process.context import Context
from unicrond.agents.trainer.process.faults import LeftEarly, NanLoss, error_report
from unicrond.agents.trainer.process.randomness import seed_all
from unicrond.agents.trainer.process.shards import is_spread
from unicrond.agents.trainer.states.state import Stateful, as_one, flatten
from unicrond.events.vocabulary import WorkerReady

_FLUSH_S = 2.0
#: An exception in the body of the loop has been reported by then.
_LEFT_S = 1.0
_BUSY_MAX_S = 7 * 86400.0


class Step:
    """One iteration. Iterate over it to get the micro-batches that this replica is to compute."""

    def __init__(self, hook: Hook, iteration: int) -> None:
        self._hook = hook
        #: It changes where all others have gone on meanwhile, and this replica receives their state.
        self.iteration = iteration
        self.agreed = False
        #: Mean loss per token over the global batch; known once the step is agreed.
        self.loss = float("nan")
        self.batch_size: int | None = None

    def __iter__(self) -> Iterator[int]:
        """Yield one micro-batch at a time; after a peer's death between two of them, more may come."""
        for (micro_batch,) in self.lists(1):
            yield micro_batch

    @property
    def is_last(self) -> bool:
        """Return whether training ends after this iteration; known once the step is agreed."""
        member = self._hook._driver.member
        return self.agreed and (member.stop_agreed or self.iteration >= self._hook.iterations)

    def lists(self, at_most: int | None = None) -> Iterator[list[int]]:
        """Yield lists of micro-batches: all that are left (pipeline schedules want them at once), or `at_most` each."""
        yield from self._hook._micro_batches(self, at_most)

    def upcoming(self, count: int) -> list[int]:
        """Return the micro-batches that this replica computes after the next `count`, as assigned now."""
        return self._hook._own_parts(self._hook._driver.member.ledger.remaining()[count:])

    def backward(self, loss: torch.Tensor, *, tokens: int | None = None, mean: bool = True) -> None:
        """Compute the micro-batch's gradients; add its loss, a mean over `tokens` (None: samples), or a sum."""
        self.add(*backward(loss, tokens, self.batch_size or self._hook.micro_batch, is_mean=mean))

    def add(self, loss_sum: float | torch.Tensor, tokens: int | torch.Tensor) -> None:
        """Add the sum of the token losses and the number of tokens of the micro-batches just computed (both 0 in
        pipeline stages without the loss). Raises NanLoss where the sum is not finite."""
        self._hook._add(float(loss_sum), int(tokens))

    def samples(self, micro_batch: int) -> tuple[int, ...]:
        """Return the indices of the micro-batch's samples in the data set."""
        return self._hook._driver.sampling.samples(self.iteration, micro_batch)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Mark what reads data (`with step.loading():`): an exception or a hang there is reported as one of the
        data."""
        process = self._hook._context
        with self._hook.section("data"):
            phase, process.phase = process.phase, "data"
            yield
            process.phase = phase

    def seed(self, micro_batch: int) -> None:
        """Seed every random number drawn for the micro-batch; call it first in the forward step."""
        seed_all(work_seed(self._hook._context.launch.spec.seed, self.iteration, micro_batch))


@dataclass(slots=True)
class Hook:
    """A training process's side of unicrond. See the module's rules; make one with `attach`."""

    _context: Context
    _driver: LifecycleDriver
    _overlap: bool
    _recomputation: Recomputation
    #: None where the model is a framework's own.
    _examination: examination.Examination | None = None
    _has_ended: bool = False
    _step: Step | None = None
    _early: LeftEarly | None = None

    @staticmethod
    def attach(
        model: torch.nn.Module | Sequence[torch.nn.Module],
        optimizer: Any,
        scheduler: Any = None,
        *,
        dataset_size: int | None = None,
        overlap: bool = False,
        loaded_iteration: int | None = None,
        gradients: Callable[[Lanes | None, int], Accumulation] | None = None,
    ) -> Hook:
        """Take over gradient accumulation and cross-replica reduction of `model` (or several).

        `optimizer` and `scheduler`, or lists of several, need state_dict and load_state_dict. `dataset_size`: samples
        in the data set, over which `step.samples` permutes; None: an endless stream. `overlap`: reduce inside the last
        backward; only for loops that give each parameter at most one gradient per micro-batch (one backward for each;
        an iteration fails where that is not so). `loaded_iteration`: the iteration after which the state is the one
        that the program has loaded itself, 0 for none, on every replica; training goes on from there, unless a later
        state is found.
        `gradients`: makes the accumulation of the task's lanes, with so many bytes in a bucket, for a framework with
        buffers of its own. Raises RuntimeError outside a worker, CannotAttach and CannotFinish for what would train
        wrongly.
        """
        process = context.current()
        models = [model] if isinstance(model, torch.nn.Module) else list(model)
        optimizer, scheduler = as_one(optimizer), as_one(scheduler)
        attachment, replica = None, process.replica
        if gradients is None:
            sizes = {"workers": replica.size, "sharers": replica.sharers}
            attachment = examination.examine(models, optimizer, scheduler, overlap=overlap, **sizes)
        replica.require_own_world()
        driver = make_driver(process, models, optimizer, scheduler, dataset_size, gradients)
        driver.member.loaded_iteration = loaded_iteration
        driver.saving.origin.note_program_state(loaded_iteration or 0)
        hook = Hook(process, driver, overlap, Recomputation(driver), attachment)
        driver.accumulation.on_gradient = partial(setattr, process.mark, "phase", "backward")
        hook._look_for_ordered_faults(models)
        process.finish = hook._finish
        process.channel.send(WorkerReady(**process.launch.reporter))
        return hook

    @staticmethod
    def attach_or_local(
        local: Local,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        optimizer: Any,
        scheduler: Any = None,
        **options: Any,
    ) -> Hook | LocalHook:
        """Attach as `attach` does in a worker, with its options; in any other process return the same loop for `local`,
        one replica without unicrond (`local.py`)."""
        if context.is_worker():
            return Hook.attach(model, optimizer, scheduler, **options)
        models = [model] if isinstance(model, torch.nn.Module) else list(model)
        attachment = examination.examine(models, as_one(optimizer), as_one(scheduler))
        sums = plain_accumulation(models, as_one(optimizer), CarriedBuffers(models))
        return LocalHook.create(local, attachment, sums, options.get("dataset_size"), options.get("loaded_iteration"))

    @property
    def is_leader(self) -> bool:
        """Return whether this process is the one of its task that reports, for what is to be done once (a run of W&B,
        an evaluation). Another takes over when it is lost; False before the first step."""
        return self._driver.member.is_leader

    @property
    def in_leader_replica(self) -> bool:
        """Return whether this process is in the leader's replica, all shards of which write a checkpoint together.
        Another replica takes over as for `is_leader`."""
        return self._driver.member.in_leader_replica

    @property
    def member(self) -> MemberState:
        """Return this worker's part in its group."""
        return self._driver.member

    @property
    def iterations(self) -> int:
        """Return after which iteration the task's training ends."""
        return self._context.launch.spec.iterations

    @property
    def global_batch(self) -> int:
        """Return the samples of one iteration of the task."""
        return self._context.launch.spec.global_batch

    @property
    def micro_batch(self) -> int:
        """Return the samples of one micro-batch of the task."""
        return self._context.launch.spec.micro_batch

    def loader(self, dataset: Any, **options: Any) -> DatasetLoader:
        """Return a loader of a dataset, or of a DataLoader in its order (`stream.py`): `for batch in loader(step)`.

        Options: `collate_fn`, `num_workers` (0: the training process loads), `prefetch` (micro-batches ahead for each
        of them; 2), and `pin_memory`, `worker_init_fn`, `multiprocessing_context`, `timeout` of torch's DataLoader.
        Before the first step. Raises BadLoader."""
        driver = self._driver
        sampling = sampling_over(dataset, driver.sampling, has_begun=driver.member.state != "new")
        loader = make_loader(self, driver.state.registered, dataset, sampling, options)
        driver.sampling = sampling
        return loader

    def look_for_program_state(self, look: Callable[[], int]) -> None:
        """Have `look` say which checkpoint of its own the program would load now: the iteration after which it was
        saved, 0 for none. A state that is saved says so: if the program loads an older one when the task is submitted
        again, that was rolled back, and is obeyed."""
        self._driver.saving.origin.look_for_program_state = look

    @property
    def sums(self) -> Accumulation:
        """Return where gradients are accumulated, for a framework with buffers of its own (`gradients` of `attach`)."""
        return self._driver.accumulation

    def register(self, name: str, stateful: Stateful) -> None:
        """Have `stateful` (a data loader, a sampler, an average of the weights) travel with the training state: to
        newcomers and into checkpoints. It must be the same on all replicas. Before the first step; raises ValueError
        for a name that is taken, BadState where its state_dict() holds more than plain values and tensors."""
        state = self._driver.state
        if name in state.registered or self._driver.member.state != "new":
            raise ValueError(f"hook.register({name!r}, ...): register each name once, before the first step")
        flatten(stateful.state_dict())
        if isinstance(stateful, torch.amp.GradScaler):
            self._driver.detection.loss_scaled = True
        state.registered[name] = stateful

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Print a line with these numbers and the iteration into the leader's log; other processes drop it."""
        if self.is_leader:
            text = ", ".join(f"{name} {float(value):g}" for name, value in metrics.items())
            print(f"iteration {self._context.iteration}: {text}", flush=True)

    def on_finish(self, save: Callable[[], None]) -> None:
        """Have all shards of the leader's replica call `save` after the last iteration, before the task is complete; if
        that replica is lost meanwhile, another calls its own."""
        self._driver.on_finish = save

    def steps(self) -> Iterator[Step]:
        """Yield the iterations that are left, one after the other, from wherever the task stands."""
        driver = self._driver
        if driver.member.state != "new":
            raise RuntimeError("hook.steps() has begun already: loop over it once, to its end")
        if self._examination is not None:
            self._examination.compare_all()
        driver.begin()
        while isinstance(driver.seam, Compute):
            if self._examination is not None:
                self._examination.compare(driver.seam.ledger.iteration, loss_scaled=driver.detection.loss_scaled)
            self._step = step = Step(self, driver.seam.ledger.iteration)
            try:
                yield step
            except GeneratorExit:
                self._note_early_exit()
                raise
            if not step.agreed:
                raise RuntimeError("the loop left a step before all its micro-batches were computed and agreed on")
            driver.advance()
        self._has_ended = True

    def stop(self, reason: str) -> None:
        """Have training end after the iteration on whose end all replicas next agree; the loop over `steps` ends then,
        on all of them, and the task is complete, with its state saved. One replica may say it, or all. `reason`: for
        people. Raises ValueError without one."""
        if not reason:
            raise ValueError("hook.stop(reason): give the reason in a few words; the task's status shows it")
        message = self._driver.member.stop(reason)
        if message is not None:
            self._context.channel.send(message)

    def section(self, name: str, *, timeout_s: float | None = None) -> contextlib.AbstractContextManager[None]:
        """Return the context of a section of the loop (`with hook.section("data"):`), in which a hang is found by that
        section's own limit. `timeout_s`: the limit of long work that is not training; None: it is calculated.

        Enter it on every replica, whichever does the work inside: the others then wait for as long. Raises ValueError.
        """
        if timeout_s is not None and not 0.0 < timeout_s <= _BUSY_MAX_S:
            raise ValueError(
                f"hook.section({name!r}, timeout_s={timeout_s}): give its most seconds (above 0, at most"
                f" {_BUSY_MAX_S:g}), or none"
            )
        return self._driver.detection.section(name, timeout_s)

    # --- within an iteration ---------------------------------------------------------------------

    def _micro_batches(self, step: Step, at_most: int | None) -> Iterator[list[int]]:
        driver = self._driver
        while isinstance(driver.seam, Compute):
            step.iteration = driver.seam.ledger.iteration
            try:
                for micro_batches in self._hand_out(at_most):
                    yield self._own_parts(micro_batches)
            except (GroupBroken, MembershipSuperseded) as failure:
                driver.throw(failure)
            else:
                driver.advance()
        step.agreed = isinstance(driver.seam, Optimize)
        if isinstance(driver.seam, Optimize):
            step.loss = driver.seam.loss

    def _hand_out(self, at_most: int | None) -> Iterator[list[int]]:
        """Yield the rest of this replica's micro-batches. Raises GroupBroken, MembershipSuperseded, QuitRequested."""
        driver, runs = self._driver, self._driver.runs
        compute_time, mark, ledger = driver.detection.compute_time, self._context.mark, driver.member.ledger
        driver.rendezvous.look()
        yield from self._recomputation.compare()
        if runs is not None:
            runs.begin()
        while (run := ledger.run) is not None:
            if runs is not None and not (at_most == 1 and runs.try_ahead(run)):
                runs.enter(run)
            todo = ledger.todo()[:at_most]
            if todo:
                compute_time.begin()
                mark.begin_micro_batch(ledger.finished)
                driver.fire("micro_batch")
                if self._overlap and ledger.is_last(todo):
                    driver.reduction.overlap(driver.group, len(todo))
                driver.accumulation.begin_micro_batches()
                yield todo
                driver.accumulation.end_micro_batches(todo)
                compute_time.end(len(todo))
                if runs is not None and runs.drops_ahead():
                    continue
            if ledger.finish(len(todo)):
                ledger.end_run()
                if runs is not None:
                    runs.end(run)
            driver.rendezvous.look()

    def _own_parts(self, micro_batches: Sequence[int]) -> list[int]:
        """Return what this worker computes of the replica's micro-batches: where its workers have samples of their own
        (`fully_sharded.py`), one of each worker's for each."""
        ranks = self._driver.sampling.ranks
        return [micro_batch * ranks + self._context.launch.shard % ranks for micro_batch in micro_batches]

    def _add(self, loss_sum: float, tokens: int) -> None:
        if self._recomputation.is_apart:
            return
        ledger = self._driver.member.ledger
        loss_sum = self._context.injection.spoil_loss(loss_sum)
        if loss_sum - loss_sum != 0.0:  # neither NaN nor infinite
            raise NanLoss(f"the loss of a micro-batch of iteration {ledger.iteration} is {loss_sum}")
        ledger.add(loss_sum, tokens)

    def _look_for_ordered_faults(self, models: Sequence[torch.nn.Module]) -> None:
        """Register hooks for points inside the computation, only where a fault is ordered there."""
        expects, fire = self._context.injection.expects, self._driver.fire
        modules = [module for model in models for module in model.modules()]
        parameters = [(module, weight) for module in modules for weight in module.parameters(False)]
        module, parameter = parameters[len(parameters) // 2]
        if expects("forward"):
            module.register_forward_hook(lambda *_: fire("forward"))
        if expects("backward") and is_spread(parameter):  # the gradient is that of another tensor, the whole parameter
            module.register_full_backward_pre_hook(lambda *_: fire("backward"))
        elif expects("backward"):
            parameter.register_hook(lambda _: fire("backward"))
        if expects("partly"):
            self._driver.reduction.on_start = self._partly

    def _partly(self) -> None:
        if self._context.injection.expects("partly"):
            with contextlib.suppress(GroupBroken, MembershipSuperseded):  # it shows where the rest is waited for
                self._driver.group.finish()
                self._driver.fire("partly")

    # --- the end of the program ------------------------------------------------------------------

    def _note_early_exit(self) -> None:
        """Note that the program has left the loop. (Raise nothing here: no caller would see it.)"""
        if self._has_ended or self._context.has_ended or not self._driver.alive:
            return
        if self._driver.member.stop_reason:
            with contextlib.suppress(QuitRequested):
                self._leave_after_stop()
        else:
            where = f"the program left the loop over hook.steps() in iteration {self._context.iteration}"
            self._early = LeftEarly(f"{where}: {LEFT_EARLY}")
            late = threading.Timer(_LEFT_S, self._report_early_exit)
            late.daemon = True
            late.start()

    def _report_early_exit(self) -> None:
        """Report the early exit after a moment. (An exception in the loop's body ends the loop before anybody can see
        it; it is reported as what it is meanwhile.)"""
        process, error = self._context, self._early
        if process.has_ended or error is None:
            return
        print(f"{process.launch.worker}: {error}", file=sys.stderr, flush=True)
        process.channel.send(
            error_report(process.launch.reporter, error, process.generation, process.iteration, process.phase)
        )
        process.channel.flush(_FLUSH_S)
        process.has_ended = True

    def _finish(self) -> None:
        """Check, at the end of the program with code 0, that it has trained to the end or stopped. Raises LeftEarly."""
        if self._has_ended:
            return
        if self._context.has_ended:
            raise SystemExit(1)  # it has been reported
        if self._early is not None:
            raise self._early
        if not self._driver.member.stop_reason or self._step is None:
            position = f"in iteration {self._context.iteration} of {self._context.launch.spec.iterations}"
            raise LeftEarly(f"the program ended {position if self._step else 'before it trained'}: {LEFT_EARLY}")
        self._leave_after_stop()

    def _leave_after_stop(self) -> None:
        """Have the lifecycle end here: the program has called `stop`, and does not come back to the loop."""
        self._driver.throw(ProgramLeftLoop())
        self._has_ended = True
