"""Megatron-LM alone, on the CPU: `torchrun tests/megatron_lm/stock.py DUMP CHECKOUT/pretrain_gpt.py FLAGS`. The last
parameters of each rank are left in DUMP.<tp rank>.<cp rank>.<data-parallel rank>.<pp rank>."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    dump, script = sys.argv[1], Path(sys.argv[2])
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # ranks share a file: a write is a line
    sys.argv = sys.argv[2:]
    sys.path.insert(0, str(script.parent))
    import torch

    from unicrond.agents.trainer.megatron import cpu

    torch.set_num_threads(1)
    cpu.apply()
    import megatron.core.datasets.utils as utils
    import megatron.training.training as training

    cpu.apply_after_import()
    utils.compile_helpers = lambda: None
    _mend_loading()
    real = training.train

    def train(forward_step: Any, model: Any, *rest: Any, **options: Any) -> Any:
        try:
            return real(forward_step, model, *rest, **options)
        finally:  # --exit-interval ends the program there
            mpu = training.mpu
            ranks = ("tensor_model_parallel", "context_parallel", "data_parallel", "pipeline_model_parallel")
            place = ".".join([dump, *(str(getattr(mpu, f"get_{name}_rank")()) for name in ranks)])
            torch.save(
                {
                    f"{number}.{name}": parameter.detach()
                    for number, chunk in enumerate(model)
                    for name, parameter in chunk.named_parameters()
                },
                place,
            )

    training.train = train
    os.chdir(script.parent)
    runpy.run_path(str(script), run_name="__main__")


def _mend_loading() -> None:
    """Megatron's DistributedOptimizer, as released, cannot load what it has saved where there is neither Apex nor
    Transformer Engine: it fails without a state, and gives all parameters one count of steps, the wrong one."""
    import torch
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    told, loaded = DistributedOptimizer.state_dict, DistributedOptimizer.load_state_dict

    def state_dict(self: Any) -> Any:
        if not self.optimizer.state:
            self._init_optimizer_states_with_dummy_values()
        return told(self)

    def load_state_dict(self: Any, state: Any) -> None:
        loaded(self, state)
        for entry in self.optimizer.state.values():
            entry["step"] = torch.tensor(float(state["optimizer"]["param_groups"][0]["step"]))

    @torch.no_grad()
    def take(self: Any, parameter: Any, tensors: Any) -> None:
        group, place = self.model_param_group_index_map[parameter]
        main = self.optimizer.param_groups[group]["params"][place]
        for name, tensor in {"param": main, **self.optimizer.state[main]}.items():
            if name != "step":
                tensor.copy_(tensors[name])

    DistributedOptimizer.state_dict = state_dict
    DistributedOptimizer.load_state_dict = load_state_dict
    DistributedOptimizer._set_main_param_and_optimizer_states = take


if __name__ == "__main__":
    main()
