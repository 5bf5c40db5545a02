"""Training that ends after so many tokens, whatever the number of iterations; in bf16, with a plain torch optimizer.

A task's `entry`, or `python examples/recipes/tokens.py` (docs/use/recipes.md).
"""

import torch

from unicrond import Hook, Local

TOKENS = 20_000
SEQ, VOCAB = 32, 64

torch.manual_seed(1)
TEXT = torch.randint(VOCAB, (4096,)).cumsum(0) % VOCAB
model = torch.nn.Sequential(
    torch.nn.Embedding(VOCAB, 32), torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, VOCAB)
)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
hook = Hook.attach_or_local(
    Local(iterations=1000, global_batch=16, micro_batch=4), model, optimizer, dataset_size=len(TEXT) - SEQ
)
for step in hook.steps():
    # Every replica comes to the same number at the same iteration. Said before its end, that is the last one.
    if step.iteration * 16 * SEQ >= TOKENS:
        hook.stop(f"{TOKENS} tokens")
    for micro_batch in step:
        step.seed(micro_batch)
        windows = torch.stack([TEXT[sample : sample + SEQ + 1] for sample in step.samples(micro_batch)])
        with torch.autocast("cpu", torch.bfloat16):
            told = model(windows[:, :-1])
        loss = torch.nn.functional.cross_entropy(told.float().flatten(0, 1), windows[:, 1:].flatten(), reduction="sum")
        loss.backward()
        step.add(loss.detach(), windows[:, 1:].numel())
    optimizer.step()
    hook.log({"loss": step.loss})
