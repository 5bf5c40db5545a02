"""The built-in GPT with parameters that several shards of a replica hold: `qk_layernorm` (norms of queries and keys,
under tensor parallelism) and tied embeddings (under pipeline parallelism). At its end each worker leaves those that it
has in `<first argument>/<worker>.shared`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from unicrond.agents.trainer.loop import corpus, pretrain_gpt
from unicrond.agents.trainer.loop.corpus import Corpus
from unicrond.agents.trainer.loop.hook import Hook
from unicrond.agents.trainer.process import context
from unicrond.agents.trainer.process.randomness import seed_all


def main() -> None:
    launch = context.current().launch
    spec = launch.spec
    prefix = Path(spec.data) if spec.data else corpus.default_prefix()
    text = Corpus(prefix, spec.model.seq)
    seed_all(spec.seed)
    config = pretrain_gpt.build_model(spec).config
    config.qk_layernorm = True
    if not torch.cuda.is_available():  # tied embeddings are exchanged where the backend would have them
        torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    seed_all(spec.seed)
    model: Any = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="LayerNorm", qk_layernorm=True),
        vocab_size=spec.model.vocab,
        max_sequence_length=spec.model.seq,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
        position_embedding_type="learned_absolute",
    )
    model.ddp_config = DistributedDataParallelConfig()
    optimizer, scheduler = pretrain_gpt.build_optimizer(spec, model)
    hook = Hook.attach(model, optimizer, scheduler, dataset_size=len(text))
    for step in hook.steps():
        for micro_batches in step.lists(at_most=1 if spec.pp == 1 else None):
            step.add(*pretrain_gpt.forward_backward(spec, model, text, step, micro_batches))
        optimizer.step()
        scheduler.step(increment=spec.global_batch)
    shared = {name: one.detach() for name, one in model.named_parameters() if "q_layernorm" in name}
    if parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage():
        shared["tied"] = model.shared_embedding_or_output_weight().detach()
    torch.save(shared, Path(sys.argv[1]) / f"{launch.worker}.shared")


main()
