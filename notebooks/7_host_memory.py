# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # More memory than the device has
# A plan may copy a value to the host, and back before backward reads it. This page asks what that
# is worth on a GPU that is not here, then runs such a plan on this CPU.

# %%
import torch
from torch import nn

import remat

MIB = 2**20


def made(width, rows):
    """Sixteen residual layers with dropout, and a batch."""
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width),
                      nn.Dropout(0.1))
        for _ in range(16)
    ]  # fmt: skip
    return nn.Sequential(*layers), (torch.randn(rows, width),)


# %% [markdown]
# ## What the host is worth
# The same budget, with more and more of the host's memory. The bound holds for all plans.

# %%
with torch.device("meta"):  # no memory for the weights
    model, _ = made(1024, 16384)
batch = (torch.randn(16384, 1024),)
for host in (None, "1GiB", "4GiB"):
    graph = remat.capture(model, batch, device="rtx4090", host=host)
    result = remat.solve(graph, "50%")
    found = result.simulate()
    moved, waits_us = found.moved_bytes.get("d2h", 0) / MIB, found.stall_us
    figures = f"overhead {100 * result.overhead:.2f} %, gap {100 * result.gap:.2f} %"
    print(f"host {host or 'none':5} {figures}, {moved:5.0f} MiB copied, {waits_us:.0f} us waited")

# %% [markdown]
# ## What becomes of each value

# %%
print(result.values(only=("0", "15")))

# %% [markdown]
# ## The same on this CPU
# Files without names stand for the host here. Bits and peak are exact; time is that of a disk.

# %%
model, batch = made(128, 1024)
fast = remat.rematerialize(model, batch, loss_fn=torch.sum, budget="50%", host="1GiB")
torch.manual_seed(1)
fast(*batch).backward()
gradients = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
torch.manual_seed(1)
model(*batch).sum().backward()
print(all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True)))
