"""Megatron-LM alone, on the CPU: `torchrun tests/megatron_lm/stock.py DUMP CHECKOUT/pretrain_gpt.py FLAGS`. The last
parameters of each rank of the first replica are left in DUMP.<tp rank>.<pp rank>."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    dump, script = sys.argv[1], Path(sys.argv[2])
    sys.argv = sys.argv[2:]
    sys.path.insert(0, str(script.parent))
    import torch

    from agents.trainer.megatron import cpu

    torch.set_num_threads(1)
    cpu.apply()
    import megatron.core.datasets.utils as utils
    import megatron.training.training as training

    cpu.behind_imports()
    utils.compile_helpers = lambda: None
    real = training.train

    def train(forward_step: Any, model: Any, *rest: Any, **options: Any) -> Any:
        try:
            return real(forward_step, model, *rest, **options)
        finally:  # --exit-interval ends the program there
            mpu = training.mpu
            if mpu.get_data_parallel_rank() == 0:
                place = f"{dump}.{mpu.get_tensor_model_parallel_rank()}.{mpu.get_pipeline_model_parallel_rank()}"
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


if __name__ == "__main__":
    main()
