"""Runs Megatron-LM's own training loop under the training lifecycle, through the names that are replaced in it
(`seams.py`).

Rules
-----
* A replica is its own world, so Megatron believes in one data-parallel rank: schedules of the learning rate, consumed
  samples and the number of micro-batches are those of the whole task by themselves.
* The hook is attached in place of `train`, behind all set-up: survivors never wait for a newcomer's imports.
* Megatron's schedule is called once for each list of micro-batches assigned. What it would average is only summed
  (`_Weighing` of `runs.py`). `finalize_model_grads` runs once, behind the sum over the replicas: so what a replica must
  still add up (tied embeddings over pipeline stages, norms under sequence parallelism, experts' bias) comes from the
  whole batch.
* The step is committed behind `train_step`. The last one only when the script is over: by then it has evaluated; its
  checkpoint is written as the lifecycle's last word, by the leader's replica, or by another if that is lost.
* Where the lifecycle goes on with another iteration than Megatron's loop expects (this replica was given a newer
  state), the loop is entered anew there.
* Evaluation is Megatron's own, its micro-batches are dealt (`evaluation.py`).
* What only the leader's replica does: checkpoints, TensorBoard, W&B, lines of the log.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from unicrond.agents.trainer.loop.hook import Hook, Step
from unicrond.agents.trainer.megatron import cpu, flags
from unicrond.agents.trainer.megatron.buffers import BufferAccumulation
from unicrond.agents.trainer.megatron.checkpointed import CheckpointedOptimizer, StateIncomplete
from unicrond.agents.trainer.megatron.data import EvaluationLoader, MicroBatchLoader, ValidationLoader, index_lock
from unicrond.agents.trainer.megatron.evaluation import Evaluations
from unicrond.agents.trainer.megatron.logs import LeadWriter, Trackers
from unicrond.agents.trainer.megatron.runs import ScheduleRuns
from unicrond.agents.trainer.megatron.seams import SEAMS, VALIDATE_ARGS
from unicrond.agents.trainer.process.context import Context
from unicrond.agents.trainer.states.storing import unsaved


class _IterationChanged(Exception):
    """Training goes on in another iteration than Megatron's loop expects."""


class Adapter:
    """Connects one worker's Megatron-LM to the lifecycle. `modules`: of Megatron-LM, by name."""

    def __init__(self, context: Context, modules: dict[str, Any], *, on_gpu: bool) -> None:
        self._context = context
        self._modules = modules
        self._training = modules["training"]
        self._on_gpu = on_gpu
        self._real: dict[str, Callable[..., Any]] = {}
        self._replaced: flags.ReplacedFlags | None = None
        self._hook: Hook | None = None
        self._steps: Iterator[Step] = iter(())
        self._step: Step | None = None
        self._sharded: CheckpointedOptimizer | None = None
        self._runs: ScheduleRuns | None = None
        self._data: list[MicroBatchLoader] = []
        self._loaders = 0
        self._evaluations = Evaluations(context)
        #: Samples consumed beyond what iterations and evaluations come to: a checkpoint can be of another batch size.
        self._train_offset = self._valid_offset = 0
        self._iteration = 0
        self._began_s = time.monotonic()
        #: The last checkpoint was not written.
        self._unsaved = False

    def log(self, text: str) -> None:
        """Print a line into this worker's log."""
        print(f"{self._context.launch.worker}: {text}", flush=True)

    def install(self) -> None:
        """Replace what stands at the seams. What stood there is called from here."""
        for seam in (*SEAMS, *VALIDATE_ARGS):
            module = self._modules[seam.module]
            real = getattr(module, seam.name, None)
            if real is not None:
                replacement = getattr(self, seam.name)
                self._real.setdefault(seam.name, real)
                setattr(module, seam.name, functools.wraps(real)(partial(replacement)))
        self._compile_once()

    def finish(self) -> None:
        """Commit the last iteration once the script has ended, and let the task be complete. Raises RuntimeError."""
        if next(self._steps, None) is not None:
            raise RuntimeError("the state was lost behind the last iteration: training must go on, in a new process")

    @property
    def _in_leader_replica(self) -> bool:
        return self._hook is not None and self._hook.in_leader_replica

    @property
    def _prints(self) -> bool:
        """Return whether this process is in the leader's replica, that of an urgent membership which is not followed
        yet included: between two iterations, when the leader is lost, another prints what it would have."""
        membership = None if self._hook is None else self._hook.member.membership
        if membership is None:
            return False
        newest = self._context.channel.newest(membership.generation, urgent_only=True) or membership
        return newest.members[0].replica == self._context.launch.replica

    @property
    def _args(self) -> Any:
        return self._training.get_args()

    # --- set-up ----------------------------------------------------------------------------------

    def validate_args(self, args: Any, *rest: Any, **options: Any) -> Any:
        """Call Megatron's, and refuse, take over or correct what unicrond must."""
        spec = self._context.launch.spec
        for line in (*flags.apply_task_layout(args, spec), *flags.drop_without_effect(args)):
            self.log(line)
        if not self._on_gpu and (changed := cpu.set_flags(args)):
            self.log(f"set for the CPU: {', '.join(changed)}")
        args = self._real["validate_args"](args, *rest, **options) or args
        flags.require(args, spec, on_gpu=self._on_gpu)
        self._replaced = flags.take_over(args, self.log)
        return args

    def _set_tensorboard_writer(self, args: Any) -> None:
        self._install_lead_writer("_set_tensorboard_writer", "_GLOBAL_TENSORBOARD_WRITER", "tensorboard_dir", args)

    def _set_wandb_writer(self, args: Any) -> None:
        self._install_lead_writer("_set_wandb_writer", "_GLOBAL_WANDB_WRITER", "wandb_project", args)

    def _install_lead_writer(self, name: str, holder: str, flag: str, args: Any) -> None:
        module = self._modules["global_vars"]

        def make() -> Any:
            """Make Megatron's real writer; None where it makes none."""
            setattr(module, holder, None)
            world_size, args.world_size = args.world_size, args.rank + 1  # it may be the whole task's (`training_log`)
            try:
                self._real[name](args)
            finally:
                args.world_size = world_size
                real_writer = getattr(module, holder)
                setattr(module, holder, writer)
            return real_writer

        if getattr(args, flag, None) and args.rank == args.world_size - 1:
            writer = LeadWriter(lambda: self._prints, make)
            setattr(module, holder, writer)

    def _compile_once(self) -> None:
        """Skip the compilation of the index builder: an installed Megatron-core has it compiled, and no Makefile."""
        with contextlib.suppress(ImportError):
            import megatron.core.datasets.helpers_cpp  # noqa: F401
            import megatron.core.datasets.utils as utils

            utils.compile_helpers = lambda: None

    def get_megatron_optimizer(self, config: Any, model: Any, *rest: Any, **options: Any) -> Any:
        """Return Megatron's optimizer, or in place of its DistributedOptimizer the one whose parts move between
        replicas."""
        assert self._replaced is not None
        if self._replaced.distributed:
            overrides = options.get("config_overrides", rest[0] if rest else None)
            self._sharded = CheckpointedOptimizer(config, model, overrides, flags.save_predicate(self._args))
            if self._args.save or self._args.load:
                flags.require_experts(self._args, self._sharded.has_spread_experts, self._context.replica.all_true)
            return self._sharded
        return self._real["get_megatron_optimizer"](config, model, *rest, **options)

    def build_train_valid_test_datasets(self, *arguments: Any, **options: Any) -> Any:
        """Call Megatron's under a lock: one process at a time builds indices on one file system."""
        with index_lock(self._args, self._context.replica.shard == 0):
            return self._real["build_train_valid_test_datasets"](*arguments, **options)

    def build_pretraining_data_loader(self, dataset: Any, consumed: int, *rest: Any, **options: Any) -> Any:
        """Return a loader of training data by the assigned micro-batches; other data from where an unbroken run would
        stand."""
        real = self._real["build_pretraining_data_loader"]
        if dataset is None:
            return real(dataset, consumed, *rest, **options)
        args = self._args
        split = getattr(dataset, "split", getattr(dataset, "index_split", None))
        name = getattr(split, "name", None) or ("train", "valid", "test")[self._loaders % 3]
        self._loaders += 1
        build = partial(real, *rest, **options)
        batch = args.micro_batch_size * args.data_parallel_size
        if name == "train":
            ahead = args.num_workers > 0
            data = MicroBatchLoader(
                build,
                dataset,
                args.global_batch_size,
                batch,
                offset=consumed - args.iteration * args.global_batch_size,
                reads_ahead=ahead,
            )
            self._data.append(data)
            return data
        if flags.divides_evaluation(args):
            return self._evaluations.add_loader(
                name,
                EvaluationLoader(build, dataset, args.global_batch_size, batch, reads_ahead=args.num_workers > 0),
            )
        if name == "valid" and not args.full_validation:
            return ValidationLoader(build, dataset, self._validated)
        return real(dataset, consumed, *rest, **options)

    def _validated(self) -> int:
        """Return the samples of validation data that were used before the present evaluation."""
        args = self._args
        return self._valid_offset + int(self._evaluations.count * args.eval_iters * args.global_batch_size)

    # --- training --------------------------------------------------------------------------------

    def train(self, forward_step: Any, model: Any, optimizer: Any, scheduler: Any, *rest: Any, **options: Any) -> Any:
        """Attach the hook, go where the task stands, and let Megatron's loop train from there."""
        args, replaced = self._args, self._replaced
        assert replaced is not None
        loaded_iteration = args.iteration
        self._take_offsets()
        if self._sharded is not None and loaded_iteration:
            self._sharded.adopt_loaded_parameters()
        config = self._training.get_model_config(model[0])
        trackers = Trackers(config)
        one_stage = self._training.mpu.get_pipeline_model_parallel_world_size() == 1
        is_scaled_mean = args.fp16 and not args.calculate_per_token_loss
        batch = args.micro_batch_size * args.data_parallel_size
        divided_by = args.global_batch_size // batch if is_scaled_mean else 1
        self._context.divided_by = divided_by
        self._hook = hook = Hook.attach(
            model,
            optimizer,
            scheduler,
            overlap=replaced.overlap and one_stage,
            loaded_iteration=loaded_iteration,
            gradients=partial(BufferAccumulation, model, trackers.numel, divided_by),
        )
        if args.load and not args.finetune and getattr(args, "ckpt_step", None) is None:
            hook.look_for_program_state(partial(flags.newest_checkpoint, args.load))
        for chunk in model:  # its own reduction has nothing to do, and would wait for one that began in the backward
            chunk.ddp_config.overlap_grad_reduce = False
        args.overlap_grad_reduce = args.exit_signal_handler = False
        is_sharded = self._sharded is not None
        self._runs = ScheduleRuns(
            hook, config, trackers, self._data, self._training.mpu, len(model), is_sharded=is_sharded
        )
        loaded_flop = args.num_floating_point_operations_so_far
        flop = self._training.num_floating_point_operations(args, args.global_batch_size)
        self._steps = hook.steps()
        self._step = next(self._steps, None)
        while self._step is not None:
            self._set_iteration(self._step.iteration - 1)
            args.num_floating_point_operations_so_far = loaded_flop + (args.iteration - loaded_iteration) * flop
            try:
                return self._real["train"](forward_step, model, optimizer, scheduler, *rest, **options)
            except _IterationChanged:
                with contextlib.suppress(AssertionError):
                    self._training.get_timers()("interval-time").stop()
                if self._step is not None and self._step.is_last:
                    self._set_iteration(self._step.iteration)
                    break
        return args.iteration, args.num_floating_point_operations_so_far

    def _take_offsets(self) -> None:
        """Note how many samples were consumed beyond what the iterations and evaluations behind come to: what `--load`
        names can have been made with another batch size. Later checkpoints of this task come to the same."""
        args = self._args
        train, valid = args.consumed_train_samples, args.consumed_valid_samples
        self._set_iteration(args.iteration)
        self._train_offset = train - args.consumed_train_samples
        if not isinstance(args.eval_iters, list):
            self._valid_offset = valid - args.consumed_valid_samples
            self._evaluations.set_offset(self._valid_offset)

    def _set_iteration(self, iteration: int) -> None:
        args = self._args
        args.iteration = self._iteration = iteration
        args.consumed_train_samples = self._train_offset + iteration * args.global_batch_size
        self._evaluations.count = iteration // args.eval_interval if args.eval_interval else 0
        args.consumed_valid_samples = self._validated() if not isinstance(args.eval_iters, list) else 0

    def get_forward_backward_func(self, *arguments: Any, **options: Any) -> Any:
        """Return Megatron's schedule; for training, one that calls it as often as micro-batches are assigned."""
        schedule = self._real["get_forward_backward_func"](*arguments, **options)

        def forward_backward(*positional: Any, **keywords: Any) -> Any:
            """Run the schedule once for an evaluation, or for all of the iteration's micro-batches."""
            if keywords.get("forward_only", False):
                return self._evaluations.compute(self._runs, partial(schedule, *positional), keywords)
            assert self._step is not None and self._runs is not None
            self._request_stop(self._step.iteration)
            return self._runs.compute(self._step, partial(schedule, *positional), keywords)

        return forward_backward

    def _request_stop(self, iteration: int) -> None:
        """Stop training where a flag asks for it: that must be known before the iteration is agreed on."""
        replaced, hook = self._replaced, self._hook
        assert replaced is not None and hook is not None
        if replaced.exit_interval and iteration % replaced.exit_interval == 0:
            hook.stop(f"--exit-interval {replaced.exit_interval}")
        if replaced.exit_after_s and time.monotonic() - self._began_s > replaced.exit_after_s:
            hook.stop(f"--exit-duration-in-mins {replaced.exit_after_s / 60:g}")
        if replaced.exit_signal and any(self._training.get_signal_handler().signals_received()):
            hook.stop("--exit-signal-handler: the signal has come")

    def train_step(self, *arguments: Any, **options: Any) -> Any:
        """Call Megatron's; then commit the step, on all replicas. Raises _IterationChanged."""
        result = self._real["train_step"](*arguments, **options)
        step = self._step
        assert step is not None and self._hook is not None
        self._evaluations.note_trainers(self._hook.member)
        self._iteration += 1
        if step.is_last and step.iteration == self._iteration:
            return result
        if not step.is_last:
            self._step = next(self._steps, None)
        if (
            step.is_last
            or step.iteration != self._iteration
            or self._step is None
            or self._step.iteration != self._iteration + 1
        ):
            raise _IterationChanged
        return result

    # --- between iterations ----------------------------------------------------------------------

    @contextlib.contextmanager
    def _section(self, name: str) -> Iterator[None]:
        """Declare work for as long as Megatron's own collectives may take."""
        assert self._hook is not None
        with self._hook.section(name, timeout_s=60.0 * self._args.distributed_timeout_minutes):
            yield

    def training_log(self, *arguments: Any, **options: Any) -> Any:
        """Call Megatron's with the whole task's workers, for which rates are logged."""
        args = self._args
        world_size, args.world_size = (
            args.world_size,
            args.world_size * (len(self._hook.member.peers) if self._hook else 1),
        )
        try:
            return self._real["training_log"](*arguments, **options)
        finally:
            args.world_size = world_size

    def print_rank_last(self, message: Any, *rest: Any, **options: Any) -> None:
        """Print once for the task."""
        if self._hook is None or self._prints:
            self._real["print_rank_last"](message, *rest, **options)

    def evaluate_and_print_results(self, *arguments: Any, **options: Any) -> Any:
        """Call Megatron's, on every replica, each of which computes its share."""
        if self._hook is None:
            return self._real["evaluate_and_print_results"](*arguments, **options)
        with self._section("evaluation"), self._evaluations.begin(self._hook.member, arguments[0], self._args):
            return self._real["evaluate_and_print_results"](*arguments, **options)

    def checkpoint_and_decide_exit(self, *arguments: Any, **options: Any) -> Any:
        """Call Megatron's; it also ends where all have agreed on the end."""
        args, step = self._args, self._step
        exit_interval = args.exit_interval
        if step is not None and step.is_last and self._iteration < args.train_iters:
            args.exit_interval = 1
        try:
            return self._real["checkpoint_and_decide_exit"](*arguments, **options)
        finally:
            args.exit_interval = exit_interval

    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        """Call Megatron's in the leader's replica. After the last iteration: when all are there (`Hook.on_finish`)."""
        save = partial(self._real["save_checkpoint"], *arguments, **options)
        if self._hook is None:
            save()
        elif self._step is None or self._step.is_last:
            self._hook.on_finish(partial(self._save_last, save))
        else:
            with self._section("checkpoint"):
                if self._in_leader_replica:
                    self._save(save)

    def _save_last(self, save: Callable[[], None]) -> None:
        args = self._args
        args.async_save = False  # no later call would complete it
        with self._section("checkpoint"):
            self._save(save)

    def maybe_finalize_async_save(self, *arguments: Any, **options: Any) -> None:
        """Call Megatron's, for what `--async-save` has written by now, or, where it waits, for all of it."""
        finalize = partial(self._real["maybe_finalize_async_save"], *arguments, **options)
        if self._hook is None or not self._args.async_save:
            finalize()
        elif options.get("blocking"):
            with self._section("checkpoint"):
                self._save(finalize, is_new=False)
        else:
            self._save(finalize, is_new=False)

    def _require_whole(self, optimizer: CheckpointedOptimizer) -> None:
        """Require the assembled state in every shard of this replica: they write it together. Raises
        StateIncomplete."""
        if not self._context.replica.all_true(optimizer.assembled is not None):
            raise StateIncomplete(
                "the leader changed while the optimizer's state was assembled; the next save writes it"
            )

    def _save(self, save: Callable[[], object], *, is_new: bool = True) -> None:
        """Save, whatever the storage does: the checkpoint before stays, an alarm says so until another is saved, or
        begun where that takes longer (`is_new`), and training goes on."""
        try:
            if is_new and self._sharded is not None:
                self._require_whole(self._sharded)
            save()
        except Exception as error:
            self.log(f"Megatron's checkpoint was not saved: {type(error).__name__}: {error}")
            self._context.channel.send(unsaved(self._context.launch.reporter, self._iteration, "program", error))
            self._unsaved = True
        else:
            if self._unsaved and is_new:
                self._context.channel.send(unsaved(self._context.launch.reporter, self._iteration, "program"))
                self._unsaved = False
