"""A Hugging Face model in a plain torch loop, in bf16, with a scheduler of torch's. Its weights are made on the spot;
`from_pretrained(...)` before `Hook.attach` does as well.

A task's `entry`, or `python examples/recipes/huggingface.py` (docs/use/recipes.md). Needs `transformers`.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from unicrond import Hook, Local

SEQ, VOCAB = 32, 64

torch.manual_seed(1)
TEXT = torch.randint(VOCAB, (4096,)).cumsum(0) % VOCAB
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        use_cache=False,
    )
)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
hook = Hook.attach_or_local(
    Local(iterations=30, global_batch=16, micro_batch=4), model, optimizer, scheduler, dataset_size=len(TEXT) - SEQ
)
for step in hook.steps():
    for micro_batch in step:
        step.seed(micro_batch)
        windows = torch.stack([TEXT[sample : sample + SEQ + 1] for sample in step.samples(micro_batch)])
        with torch.autocast("cpu", torch.bfloat16):
            told = model(input_ids=windows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(told.float().flatten(0, 1), windows[:, 1:].flatten(), reduction="sum")
        loss.backward()  # the sum of the tokens' losses: the hook divides by all tokens of the global batch
        step.add(loss.detach(), windows[:, 1:].numel())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    hook.log({"loss": step.loss})
