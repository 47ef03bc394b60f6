"""nanoGPT's loop: `python examples/trainers/nanogpt_loop.py`, or under `torchrun`.

Gradients of several batches are summed, in bfloat16, and clipped. With ``accumulate=True`` the plan
counts those that are there before a batch. Under `torchrun`, DDP exchanges them with the last one,
and each rank plans by itself at its first step. `GPT` is a model whose forward returns logits and
loss, as nanoGPT's does.
"""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import remat


class GPT(torch.nn.Module):
    """A small decoder with tied weights."""

    def __init__(self, vocabulary=64, width=64, heads=4, layers=2):
        super().__init__()
        self.wte = torch.nn.Embedding(vocabulary, width)
        self.h = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = torch.nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.head.weight

    def forward(self, ids, targets):
        """Logits of the next tokens, and their mean loss."""
        mask = torch.nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = self.wte(ids)
        for block in self.h:
            x = block(x, src_mask=mask)
        logits = self.head(x)
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


ddp = "RANK" in os.environ
if ddp:
    dist.init_process_group("gloo")
rank, n_ranks = (dist.get_rank(), dist.get_world_size()) if ddp else (0, 1)
torch.manual_seed(0)
model, data = GPT(), torch.randint(64, (4096,))
torch.manual_seed(1 + rank)

model = remat.rematerialize(model, budget="70%", accumulate=True)  # the one line

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
wrapped = DistributedDataParallel(model) if ddp else model
accumulated, losses = 4 // n_ranks, []
for _ in range(3):
    for micro_step in range(accumulated):
        starts = torch.randint(len(data) - 33, (8,))
        x = torch.stack([data[i : i + 32] for i in starts])
        y = torch.stack([data[i + 1 : i + 33] for i in starts])
        if ddp:
            wrapped.require_backward_grad_sync = micro_step == accumulated - 1
        with torch.autocast("cpu", torch.bfloat16):
            logits, loss = wrapped(x, y)
            loss = loss / accumulated
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item())
if rank == 0:
    print(losses)
if ddp:
    dist.destroy_process_group()
