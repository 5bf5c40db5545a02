"""A training script as one writes it for one GPU: a small transformer over text, with torch's DataLoader, autocast, a
warm-up, clipping, accumulation, evaluation, TensorBoard and a checkpoint of its own.

    python examples/plain_torch.py

`diff -w examples/plain_torch.py examples/recipes/torch_loop.py` shows all that unicrond asks for.
"""

import itertools
import os
import typing
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from torch.utils.tensorboard import SummaryWriter

OUT = Path(os.environ.get("TENSORBOARD_DIR", "runs"))
CONTEXT, WIDTH, HEADS, LAYERS = 32, 32, 2, 2
ITERATIONS, BATCH, ACCUMULATE = 24, 4, 4
WARM_UP, EVALUATE_EVERY = 8, 8
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of a text of bytes, and what follows each byte."""

    def __init__(self, text: torch.Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.text[number * CONTEXT : (number + 1) * CONTEXT + 1]
        return window[:-1], window[1:]


class Transformer(torch.nn.Module):
    """A decoder of few layers."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = torch.nn.Embedding(256, WIDTH)
        self.positions = torch.nn.Parameter(torch.randn(CONTEXT, WIDTH) / 10)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.1, batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = torch.nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the scores of each next byte."""
        mask = torch.nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=text.device)
        return self.head(self.layers(self.bytes(text) + self.positions, mask, is_causal=True))


@torch.no_grad()
def evaluate(model: torch.nn.Module, dataset: Windows) -> float:
    """Return the mean loss over the held-out text."""
    model.eval()
    losses = [
        cross_entropy(model(text.to(DEVICE)).flatten(0, 1), following.to(DEVICE).flatten())
        for text, following in DataLoader(dataset, BATCH)
    ]
    model.train()
    return float(torch.stack(losses).mean())


torch.manual_seed(1)
source = torch.frombuffer(bytearray(Path(typing.__file__).read_bytes()), dtype=torch.uint8).long()
training, held_out = Windows(source[4096:]), Windows(source[:4096])
model = Transformer().to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda steps: min(1.0, (steps + 1) / WARM_UP))
loader = DataLoader(training, BATCH, shuffle=True, num_workers=1)
batches = itertools.chain.from_iterable(itertools.repeat(loader))
OUT.mkdir(parents=True, exist_ok=True)
writer = SummaryWriter(OUT)
for iteration in range(1, ITERATIONS + 1):
    for text, following in itertools.islice(batches, ACCUMULATE):
        with torch.autocast(DEVICE, torch.bfloat16):
            scores = model(text.to(DEVICE))
        loss = cross_entropy(scores.float().flatten(0, 1), following.to(DEVICE).flatten())
        (loss / ACCUMULATE).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    writer.add_scalar("norm", norm, iteration)
    print(f"iteration {iteration}: norm {norm:.4f}", flush=True)
    if iteration % EVALUATE_EVERY == 0:
        print(f"iteration {iteration}: held out {evaluate(model, held_out):.4f}", flush=True)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, OUT / "checkpoint.pt")
