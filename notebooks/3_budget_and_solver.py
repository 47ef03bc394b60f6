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
# # Choosing a budget and a solver
# How much time does each byte buy? A **front** solves one graph at many budgets. The step is
# planned for a device of the table, an L4, so the figures are the same on every machine.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import remat
from remat.schedules.plots import draw_front

with torch.device("meta"):
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
x, y = torch.zeros(16, 512, 512), torch.zeros(16, 512, 512)
graph = remat.capture(model, (x,), loss_fn=nn.functional.mse_loss, target=y, device="l4")

# %% [markdown]
# ## The front
# Six budgets from the least known to the unmodified peak. `gap` says how far each can be from the
# best: where it is 0, no solver can do better.

# %%
front = remat.sweep(graph, 6, time_limit_s=8)
front

# %% [markdown]
# ## What a little more memory is worth
# A GiB more or less, or on a small model 5 % of the peak.

# %%
result = remat.solve(graph, "60%", time_limit_s=4)
result.price_of(time_limit_s=4)

# %% [markdown]
# ## Solvers side by side
# `auto` is the one to train with. The others say what a simpler rule would cost:
# checkpoints around each layer (`full`), around some of them (`every_n_layers`), eviction at run
# time (`dtr`), segments (`chen_sqrt`).

# %%
names = ["auto", "cut", "dtr", "every_n_layers", "full", "chen_sqrt"]
sweep = remat.sweep(graph, ["50%", "65%", "80%"], solvers=names, time_limit_s=5)
figure, ax = plt.subplots(figsize=(9, 4), layout="constrained")
_ = draw_front(ax, sweep.fronts, budget_bytes=result.budget_bytes)
# %% [markdown]
# ## A slider
# In a running notebook, each move of the slider solves again. The cell below it says the same
# without a slider.

# %%
slider = front.slider()
slider.widget(60)

# %%
print(slider.text(60))
print()
print(slider.text(80))
