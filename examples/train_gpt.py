"""An ordinary training loop over the example GPT, in three fifths of the usual memory.

Run it as `python examples/train_gpt.py`. Only the line with `remat.rematerialize` differs
from a loop without remat: the module it returns shares the model's parameters.
"""

from __future__ import annotations

import torch
from gpt import factory

import remat

STEPS = 10
ACCUMULATE = 2

built = factory()
model, args = built["model"], built["args"]
fast = remat.rematerialize(model, args, budget="60%", optimizer="adamw", accumulate=True)
optimizer = torch.optim.AdamW(fast.parameters(), lr=3e-4)

for step in range(STEPS):
    total = 0.0
    for _ in range(ACCUMULATE):
        loss = fast(*args) / ACCUMULATE
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {total:.4f}")
