"""Hugging Face's Trainer, healed: of the script alone, the import is another one.

A task's `entry`, with `global_batch: 8, micro_batch: 2, iterations: 12`; or `python examples/recipes/trainer.py`
(docs/use/adapters.md). Needs `transformers` and `accelerate`.
"""

import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from unicrond import HuggingFaceTrainer as Trainer

SEQ, VOCAB = 16, 32
Sample = dict[str, torch.Tensor]


def samples(count: int, seed: int) -> list[Sample]:
    """Sequences that count up, of several lengths."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        first, length = torch.randint(VOCAB, (2,), generator=generator).tolist()
        tokens = (first + torch.arange(SEQ)) % VOCAB
        labels = tokens.clone()
        labels[4 + length % (SEQ - 4) :] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


torch.manual_seed(1)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
)
arguments = TrainingArguments(
    output_dir=os.environ.get("TRAINER_DIR", "trained"),
    num_train_epochs=4,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=4,
    learning_rate=1e-2,
    warmup_steps=3,
    max_grad_norm=1.0,
    logging_steps=1,
    eval_strategy="epoch",
    save_strategy="epoch",
    save_total_limit=1,
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(model, arguments, train_dataset=samples(21, seed=1), eval_dataset=samples(8, seed=2))
trainer.train()
