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
# # A first plan
# From a model and a batch to a module that trains in less memory. Open this file with
# jupytext, or run it as a script.

# %%
import torch

import remat

torch.manual_seed(0)
layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(12)]
model = torch.nn.Sequential(*layers)
x, y = torch.randn(1024, 256), torch.randn(1024, 256)
loss_fn = torch.nn.functional.mse_loss

# %% [markdown]
# The step as a graph of ops over values, each op timed on this machine.

# %%
graph = remat.capture(model, (x,), loss_fn=loss_fn, target=y)
graph

# %% [markdown]
# The fastest schedule at 60 % of the unmodified peak, and how far it can be from the best.

# %%
result = remat.solve(graph, "60%")
result

# %% [markdown]
# What runs more than once.

# %%
assert result.schedule is not None
again = {op: n for op, n in result.schedule.computations().items() if n > 1}
again

# %% [markdown]
# A module that carries it out, and the proof that it computes the same bits.

# %%
fast = remat.rewrite(model, result.schedule)
found = remat.check(model, fast, (x,), loss_fn=loss_fn, target=y)
assert found.equal
found

# %%
loss = fast(x, target=y)
loss.backward()
