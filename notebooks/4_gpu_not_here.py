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
# # Planning for a GPU that you do not have
# A model on torch's `meta` device needs no room for its weights, and its step is captured on the
# CPU. Costs come from a model of the device: shares of the peak rates that its maker states, fitted
# to published training steps. Nothing is run.

# %%
import torch
from torch import nn

import remat
from remat.analysis.plan_report import costs_text

WIDTH, LAYERS, BATCH, TOKENS = 4096, 8, 4, 2048


def big_model() -> nn.Module:
    """About 1.6 billion parameters in bfloat16, without storage."""
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(
            WIDTH, 32, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True
        )
        return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).bfloat16()


def loss_fn(y: torch.Tensor) -> torch.Tensor:
    """Some loss to train by."""
    return y.float().square().mean()


batch = torch.zeros(BATCH, TOKENS, WIDTH, dtype=torch.bfloat16)
model = big_model()
print(f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f} billion parameters")

# %% [markdown]
# ## Does it fit?
# The budget `auto` is the memory of the device less a tenth. The state of AdamW counts too.

# %%
results = {}
for device in ("l4", "a100-40gb", "h100"):
    graph = remat.capture(model, (batch,), loss_fn=loss_fn, optimizer="adamw", device=device)
    results[device] = remat.solve(graph, "auto", time_limit_s=3)
    print(device, results[device])

# %% [markdown]
# What the figures rest on:

# %%
print(costs_text(graph))

# %% [markdown]
# ## What is the least it needs?

# %%
least = remat.solve(graph, "min", time_limit_s=3)
print(f"{least.peak_bytes / 2**30:.1f} GiB, overhead {100 * least.overhead:.1f} %")

# %% [markdown]
# ## Two ranks instead of one
# With FSDP2 each rank holds its part of parameters, gradients and optimizer state, and the buffers
# that parameters are gathered into count as well.

# %%
ranks = remat.Sharding("fsdp2", 2, "layers.*")
shared = remat.capture(
    model, (batch,), loss_fn=loss_fn, optimizer="adamw", device="l4", sharding=ranks
)
remat.solve(shared, "auto", time_limit_s=3)
