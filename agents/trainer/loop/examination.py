"""Examines what a program gives to `Hook.attach`: what cannot be trained as the program alone would train it is
refused, in one sentence that names the parameter and the fix. docs/use/hook.md has the table.

Rules
-----
* Every parameter that requires gradients is stepped by an attached optimizer, and every parameter that an attached
  optimizer steps is in an attached model: what is not, no newcomer would receive.
* Gradients are summed in float32. Parameters are float32, bfloat16 or float16, on one device, and whole in each worker
  or sharded over those of a replica (`fully_sharded.py`).
* What holds at `attach` holds to the end: before the first iteration all is compared again, and before each what
  costs nothing to compare.
* The first iterations of a task change some parameter, or it would "complete" without having trained. A loss scale may
  be too large for as long, and a learning rate of 0 is the program's wish.
* Models in Megatron's own buffers (`gradients` of `attach`) are Megatron-LM's, and examined there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from unicrond.agents.trainer.detection.checksum import ParameterDigest
from unicrond.agents.trainer.loop import fully_sharded
from unicrond.agents.trainer.process.shards import is_spread, reshard, shard_of
from unicrond.agents.trainer.states import layout
from unicrond.agents.trainer.states.state import BadState, flatten, members_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: So many iterations may leave all parameters as they were.
IDLE_ITERATIONS_MAX = 10
_NAMES_MAX = 3
#: Those of torch whose step cannot be the last thing in an iteration, or needs gradients of another kind, and why.
_UNFIT = {
    "LBFGS": "computes the loss again inside its step, on one replica's data alone",
    "SparseAdam": "takes sparse gradients, and these are dense; use torch.optim.Adam",
}
_WRAPPERS = {
    "DistributedDataParallel": "give Hook.attach `model.module`, and call that in the loop",
    "DataParallel": "give Hook.attach `model.module`, and call that in the loop",
    "FullyShardedDataParallel": "give Hook.attach the module as it was before it was wrapped",
}
NamedParameters: TypeAlias = list[tuple[str, torch.nn.Parameter]]


class CannotAttach(ValueError):
    """The program would train otherwise than alone; the text says what is in the way, and the fix."""


def examine(
    models: Sequence[torch.nn.Module],
    optimizer: Any,
    scheduler: Any,
    *,
    workers: int = 1,
    sharers: int = 1,
    overlap: bool = False,
) -> Examination:
    """Examine what a program attaches; return what is compared later. `workers`: of a replica, `sharers`: those of them
    that share its samples, 1 for none. `overlap`: of Hook.attach. Raises CannotAttach."""
    for model in models:
        _require_plain_modules(model)
    parameters = _parameters_by_name(models)
    _require_plain_parameters(parameters)
    if text := fully_sharded.obstacle(models, parameters, workers, sharers):
        raise CannotAttach(text)
    optimizers, schedulers = members_of(optimizer), members_of(scheduler)
    for role, members in (("optimizer", optimizers), ("scheduler", schedulers)):
        for member in members:
            _require_state(role, member)
    if not optimizers:
        raise CannotAttach("Hook.attach(model, optimizer): no optimizer was given; give all that step the model")
    _require_coverage(parameters, optimizers)
    if any(is_spread(parameter) for _, parameter in parameters) and (overlap or not needs_torch_grads(optimizer)):
        culprit = "Hook.attach(overlap=True)" if overlap else "an optimizer of Megatron's"
        raise CannotAttach(f"{culprit} is not taken beside fully_shard yet; leave it out, or fully_shard")
    fully_sharded.take_over(models)
    return Examination(list(models), optimizers, parameters, _numbers(models, optimizers))


def needs_torch_grads(optimizer: Any) -> bool:
    """Return whether an optimizer reads `parameter.grad`. Megatron's read `main_grad`."""
    return not all(isinstance(member, MegatronOptimizer) for member in members_of(optimizer))


@dataclass(slots=True)
class Examination:
    """What was attached, as it was."""

    models: list[torch.nn.Module]
    optimizers: list[Any]
    parameters: NamedParameters
    numbers: tuple[int, ...]
    _flags: tuple[bool, ...] = ()
    #: Of all parameters before the first iteration, 0: this process does not know them.
    _first_digest: int = 0
    #: Whether an optimizer had a learning rate in one of the first iterations.
    _has_rate: bool = False
    #: Whether some parameters are sharded, of whose optimizer's state nothing is known yet.
    _is_state_unseen: bool = False

    def __post_init__(self) -> None:
        self._flags = tuple(parameter.requires_grad for _, parameter in self.parameters)
        self._is_state_unseen = any(is_spread(parameter) for _, parameter in self.parameters)

    def compare_all(self) -> None:
        """Compare everything, before the first iteration. Raises CannotAttach."""
        if _numbers(self.models, self.optimizers) != self.numbers:
            raise CannotAttach(
                "the parameters of the model or of an optimizer have been replaced since Hook.attach; attach when the"
                " model is as it is to be trained, on its device, with its optimizers"
            )
        for name, parameter in self.parameters:
            if parameter.requires_grad and _hooks(parameter) != 1:
                raise CannotAttach(_hook_text(name))

    def compare(self, iteration: int, *, loss_scaled: bool) -> None:
        """Compare what costs nothing to compare, before an iteration. Raises CannotAttach."""
        if not loss_scaled:
            self._require_training(iteration)
        if self._is_state_unseen and any(getattr(optimizer, "state", None) for optimizer in self.optimizers):
            self._is_state_unseen = False
            if text := fully_sharded.uneven_state(self.optimizers):
                raise CannotAttach(text)
        for (name, parameter), flag in zip(self.parameters, self._flags, strict=True):
            if parameter.requires_grad is not flag:
                raise CannotAttach(
                    f"{name}: requires_grad has changed since Hook.attach, which takes the parameters as they are;"
                    " freeze before it, or give a frozen parameter's group a learning rate of 0"
                )

    def _require_training(self, iteration: int) -> None:
        if iteration <= IDLE_ITERATIONS_MAX:
            self._has_rate |= any(self._learning_rates())
        trained = [weight for _, weight in self.parameters if weight.requires_grad and shard_of(weight).numel()]
        if iteration not in (1, 1 + IDLE_ITERATIONS_MAX) or not trained:
            return
        digest = ParameterDigest(trained).number()
        if iteration == 1:
            self._first_digest = digest
        elif digest == self._first_digest and self._has_rate:
            raise CannotAttach(
                f"{IDLE_ITERATIONS_MAX} iterations have changed no parameter: call backward() for each micro-batch, and"
                " optimizer.step() after the loop over the step, with no zero_grad() between them"
            )

    def _learning_rates(self) -> Iterator[Any]:
        for optimizer in self.optimizers:
            yield from (group.get("lr", True) for group in getattr(optimizer, "param_groups", ()))


def _numbers(models: Sequence[torch.nn.Module], optimizers: Sequence[Any]) -> tuple[int, ...]:
    """Return the identities of all parameters, in the models and in the optimizers."""
    in_models = (id(parameter) for _, parameter in _parameters_by_name(models))
    return (*in_models, *(id(parameter) for optimizer in optimizers for parameter in _in_groups(optimizer)))


def _parameters_by_name(models: Sequence[torch.nn.Module]) -> NamedParameters:
    """Return all parameters with their names, each once."""
    by_number: dict[int, tuple[str, torch.nn.Parameter]] = {}
    for number, model in enumerate(models):
        reshard(model)
        for name, parameter in model.named_parameters():
            by_number.setdefault(id(parameter), (f"{number}.{name}" if len(models) > 1 else name, parameter))
    return list(by_number.values())


# --- modules and parameters ----------------------------------------------------------------------


def _require_plain_modules(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        where = f"{name}: " if name else ""
        wrapper = next((kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.")), "")
        if wrapper in _WRAPPERS:
            raise CannotAttach(
                f"{where}the model is wrapped in torch's {wrapper}, which would reduce gradients a second time;"
                f" {_WRAPPERS[wrapper]}"
            )
        if isinstance(module, torch.nn.SyncBatchNorm):
            raise CannotAttach(
                f"{where}SyncBatchNorm takes its statistics over all ranks of a process group, and replicas have none"
                " in common; use BatchNorm, whose statistics are a micro-batch's"
            )


def _require_plain_parameters(parameters: NamedParameters) -> None:
    for name, parameter in parameters:
        if torch.nn.parameter.is_lazy(parameter):
            raise CannotAttach(f"{name} has no shape yet: run one forward pass before Hook.attach")
        if parameter.is_meta:
            raise CannotAttach(f"{name} is on the meta device: give it memory and values before Hook.attach")
        if parameter.requires_grad and parameter.dtype not in DTYPES:
            raise CannotAttach(
                f"{name} is {parameter.dtype}: gradients are summed in float32, for parameters of float32, bfloat16 or"
                " float16; convert the model (model.float()) before Hook.attach, or freeze the parameter"
            )
        if parameter.requires_grad and _hooks(parameter):
            raise CannotAttach(_hook_text(name))
    devices = {str(parameter.device): name for name, parameter in parameters if parameter.requires_grad}
    if len(devices) > 1:
        places = " and ".join(f"{name} on {device}" for device, name in sorted(devices.items()))
        raise CannotAttach(f"{places}: a process trains on one device; move the model there before Hook.attach")


def _hooks(parameter: torch.nn.Parameter) -> int:
    return len(parameter._post_accumulate_grad_hooks or ())


def _hook_text(name: str) -> str:
    return (
        f"{name} has a post-accumulate gradient hook beside the hook's own: it would act on one micro-batch's gradient,"
        " on one replica; do its work between the loop over step and optimizer.step(), and attach once"
    )


# --- optimizers and schedulers -------------------------------------------------------------------


def _require_state(role: str, member: Any) -> None:
    kind = type(member).__name__
    if not (callable(getattr(member, "state_dict", None)) and callable(getattr(member, "load_state_dict", None))):
        raise CannotAttach(
            f"the {role} {kind} has no state_dict and load_state_dict: no newcomer could go on from its state; add both"
            " (plain values and tensors)"
        )
    reason = next((_UNFIT[base.__name__] for base in type(member).__mro__ if base.__name__ in _UNFIT), "")
    if reason:
        raise CannotAttach(f"the {role} {kind} {reason}")
    if not isinstance(member, MegatronOptimizer):
        try:
            flatten(member.state_dict())
        except BadState as error:
            raise CannotAttach(
                f"the {role} {kind}: its state_dict must hold plain values and tensors alone; {error}"
            ) from None


def _in_groups(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in getattr(optimizer, "param_groups", None) or ():
        yield from group["params"]


def _stepped(optimizer: Any) -> Iterable[torch.Tensor] | None:
    """Return the model's parameters that the optimizer steps; None where only Megatron knows."""
    try:
        return [parameter for _, parameter in layout.owners(optimizer)]
    except (layout.UnknownOptimizer, AttributeError):
        if isinstance(optimizer, MegatronOptimizer):
            return None
    if getattr(optimizer, "param_groups", None) is None:
        raise CannotAttach(
            f"the optimizer {type(optimizer).__name__} has no param_groups, so which parameters it steps is unknown;"
            ' give it param_groups ([{"params": [...]}]), or derive it from torch.optim.Optimizer'
        )
    return list(_in_groups(optimizer))


def _require_coverage(parameters: NamedParameters, optimizers: Sequence[Any]) -> None:
    targets: dict[int, tuple[torch.Tensor, Any]] = {}
    for optimizer in optimizers:
        members = _stepped(optimizer)
        if members is None:
            return
        targets |= {id(parameter): (parameter, optimizer) for parameter in members}
    omissions = [name for name, parameter in parameters if parameter.requires_grad and id(parameter) not in targets]
    if omissions:
        more = f" and {len(omissions) - _NAMES_MAX} more" if len(omissions) > _NAMES_MAX else ""
        raise CannotAttach(
            f"{', '.join(omissions[:_NAMES_MAX])}{more}: requires gradients and stands in no attached optimizer; attach"
            " all optimizers, Hook.attach(model, [adam, muon]), or freeze it (requires_grad_(False))"
        )
    numbers = {id(parameter) for _, parameter in parameters}
    for number, (parameter, optimizer) in targets.items():
        if number not in numbers:
            raise CannotAttach(
                f"the optimizer {type(optimizer).__name__} steps a parameter of shape {tuple(parameter.shape)} that is"
                " in no attached model; attach all models, Hook.attach([model, head], ...)"
            )
