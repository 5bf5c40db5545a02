"""A user's own script, as any that ends in pretrain(...): BERT or T5 of Megatron-core, its own flag, its own data set.
It knows nothing of unicrond."""

from __future__ import annotations

from argparse import ArgumentParser
from functools import partial
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.T5 import T5Model
from megatron.core.models.T5.t5_spec import get_t5_decoder_with_local_block_spec, get_t5_encoder_with_local_block_spec
from megatron.training import get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args

MASK = 1


def own_flags(parser: ArgumentParser) -> ArgumentParser:
    parser.add_argument("--own-model", choices=("bert", "t5"), required=True)
    return parser


class Masked(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Sequences of random tokens, every seventh of which is to be guessed; sample i is the same wherever it is read."""

    def __init__(self, samples: int, length: int, vocabulary: int, seed: int) -> None:
        self._samples, self._length, self._vocabulary, self._seed = samples, length, vocabulary, seed

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        drawn = torch.Generator().manual_seed(self._seed + number)
        text = torch.randint(MASK + 1, self._vocabulary, (self._length,), generator=drawn)
        hidden = (torch.arange(self._length) + number) % 7 == 0
        sample = {"text": text.masked_fill(hidden, MASK), "labels": text, "loss_mask": hidden.float()}
        return {**sample, "number": torch.tensor(number)}


def data_sets(wanted: list[int]) -> tuple[Masked | None, ...]:
    args = get_args()
    return tuple(
        Masked(count, args.seq_length, args.vocab_size, args.seed) if count else None for count in map(int, wanted)
    )


def model(pre_process: bool = True, post_process: bool = True, **_: Any) -> torch.nn.Module:
    args = get_args()
    config = core_transformer_config_from_args(args)
    shape = {"vocab_size": args.padded_vocab_size, "max_sequence_length": args.max_position_embeddings}
    ends = {"pre_process": pre_process, "post_process": post_process, "parallel_output": True}
    if args.own_model == "t5":
        return T5Model(
            config=config,
            encoder_config=config,
            transformer_encoder_layer_spec=get_t5_encoder_with_local_block_spec(args.num_layers),
            transformer_decoder_layer_spec=get_t5_decoder_with_local_block_spec(args.num_layers),
            share_embeddings_and_output_weights=True,
            **shape,
            **ends,
        )
    return BertModel(
        config=config,
        num_tokentypes=2,
        transformer_layer_spec=bert_layer_local_spec,
        add_binary_head=False,
        share_embeddings_and_output_weights=True,
        **shape,
        **ends,
    )


def loss(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    total, tokens = (output.float() * mask).sum(), mask.sum().to(torch.int)
    return total, tokens, {"lm loss": torch.cat([total.detach().view(1), tokens.float().view(1)])}


def forward(samples: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    batch = next(samples)
    if not model.training:
        print("evaluates", *batch["number"].tolist(), flush=True)
    text, labels, mask = batch["text"], batch["labels"], batch["loss_mask"]
    if get_args().own_model == "t5":
        size = text.shape[1]
        whole = torch.zeros(text.shape[0], 1, size, size, dtype=torch.bool)
        ahead = torch.ones(size, size, dtype=torch.bool).triu(1).expand(text.shape[0], 1, size, size)
        output = model(text, labels.roll(1, 1), whole, ahead, whole, lm_labels=labels)
    else:
        output, _ = model(text, torch.ones_like(text), torch.zeros_like(text), labels)
    return output, partial(loss, mask)


if __name__ == "__main__":
    data_sets.is_distributed = False  # type: ignore[attr-defined]
    pretrain(data_sets, model, ModelType.encoder_or_decoder, forward, extra_args_provider=own_flags)
