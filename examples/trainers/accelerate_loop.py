"""Accelerate: `python examples/trainers/accelerate_loop.py`.

Mixed precision is part of the plan: Accelerate sets it around ``forward``, and the step is captured
there.
"""

import torch
from accelerate import Accelerator

import remat

torch.manual_seed(0)
layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)]
model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 8))
data = torch.utils.data.TensorDataset(torch.randn(1280, 64), torch.randint(8, (1280,)))

model = remat.rematerialize(model, budget="60%")  # the one line

accelerator = Accelerator(cpu=True, mixed_precision="bf16")
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(data, batch_size=512, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for x, y in loader:
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    losses.append(loss.item())
print(losses)
