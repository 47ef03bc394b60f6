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
# # A first plan in five minutes
# From a model and a batch to a module that trains in less memory. Each cell runs on a CPU in
# seconds; `remat run FILE.py:factory --budget 60%` does the same in one line.

# %%
import torch

import remat

torch.manual_seed(0)
layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(12)]
model = torch.nn.Sequential(*layers)
x, y = torch.randn(512, 256), torch.randn(512, 256)
loss_fn = torch.nn.functional.mse_loss

# %% [markdown]
# **Capture.** The training step, forward and backward, as a graph of ops over values. Each
# distinct op is timed on this machine.

# %%
graph = remat.capture(model, (x,), loss_fn=loss_fn, target=y)
graph

# %% [markdown]
# **Solve.** The fastest schedule whose peak is at most 60 % of the peak of the unmodified step.
# A plan shows whether it fits, what it costs and how far it can be from the best there is, and
# memory through the step. The search has proved that; nothing has run yet.

# %%
result = remat.solve(graph, "60%")
result

# %% [markdown]
# What runs more than once, and how often.

# %%
again = {op: n for op, n in result.schedule.computations().items() if n > 1}
again

# %% [markdown]
# **Rewrite and check.** `rewrite` makes a module that carries the schedule out, with the same
# parameters. `check` compares it with the model: every gradient, output, buffer and random number,
# and the peaks that the profiler measures.

# %%
fast = result.apply(model)
found = remat.check(model, fast, (x,), loss_fn=loss_fn, target=y, steps=2)
assert found.equal
print(f"{found.gradients} of {found.gradients_total} gradients are equal to the last bit")
print(f"unmodified peak {found.baseline_peak_bytes / 2**20:.1f} MiB")
print(f"planned peak    {found.plan_peak_bytes / 2**20:.1f} MiB")

# %% [markdown]
# **Train.** The loss is part of the step that was captured, so the module takes the target.

# %%
optimizer = torch.optim.Adam(fast.parameters(), lr=1e-3)
for _ in range(3):
    optimizer.zero_grad()
    loss = fast(x, target=y)
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")

# %% [markdown]
# All of this in one call, which also checks before it returns:

# %%
fast = remat.rematerialize(model, (x,), loss_fn=loss_fn, target=y, budget="60%")
plan = remat.plans(fast)[0]

# %% [markdown]
# The plan is data. It is kept as a file and loaded in another process, where nothing is solved.

# %%
plan.save("plan.json")
loaded = remat.load("plan.json").apply(model, loss_fn=loss_fn)
torch.equal(loaded(x, target=y), fast(x, target=y))

# %% [markdown]
# **The verdict.** Whether the plan fits, what it costs, what is proved, and what the check found;
# and memory through the step, with the plan and without. `plan.report("report.html")` writes a page
# with the same at its top.

# %%
plan
