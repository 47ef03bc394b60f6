"""A plain loop: `python examples/trainers/plain_loop.py`.

The last batch, of 256, gets a plan of its own. The loss is outside the plan; with ``loss_fn=`` it
is part of it, and is called as ``model(x, target=y)``.
"""

import torch

import remat

torch.manual_seed(0)
layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)]
model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 8))
data = torch.utils.data.TensorDataset(torch.randn(1280, 64), torch.randint(8, (1280,)))

model = remat.rematerialize(model, budget="60%")  # the one line

optimizer = torch.optim.AdamW(model.parameters())
losses = []
for x, y in torch.utils.data.DataLoader(data, batch_size=512, shuffle=True):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(losses)
