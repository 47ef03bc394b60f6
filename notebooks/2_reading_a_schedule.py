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
# # Reading a schedule
# A schedule is a list of four kinds of step over ops and values. This notebook takes one apart:
# what it keeps, what it computes again, and what holds the memory where it is fullest. The step is
# planned for a device of the table, an L4, so the figures are the same on every machine.

# %%
from collections import Counter

import matplotlib.pyplot as plt
import torch
from torch import nn

import remat
from remat.schedules.plots import draw_live_bytes, draw_peak_values, draw_ribbon

with torch.device("meta"):
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
x, y = torch.zeros(16, 512, 512), torch.zeros(16, 512, 512)
graph = remat.capture(model, (x,), loss_fn=nn.functional.mse_loss, target=y, device="l4")
result = remat.solve(graph, "60%")
result

# %% [markdown]
# ## Ops and values
# An **op** creates storage, draws randomness or mutates. A **value** is one storage: a tensor with
# all its views. Each op knows its cost, its module, and the line behind it if that is in a file.

# %%
op = max(graph.ops, key=lambda op: op.cost_us)
print(op.name, op.target, op.phase, f"{op.cost_us:.0f} us", op.module, sep="\n")

# %% [markdown]
# Other tools take the step as a graph of networkx, whose nodes are ops and whose edges are values.
# Here: the values that backward reads, and the modules whose forward made most of their bytes.

# %%
step = graph.to_networkx()
phase = step.nodes(data="phase")
held = {
    (made, name): size_bytes
    for made, reader, name, size_bytes in step.edges(keys=True, data="size_bytes")
    if (phase[made], phase[reader]) == ("forward", "backward")
}
of_modules = Counter()
for (made, _), size_bytes in held.items():
    of_modules[step.nodes[made]["module"]] += size_bytes
print(
    step, *(f"{name}: {size / 2**20:.0f} MiB" for name, size in of_modules.most_common(3)), sep="\n"
)

# %% [markdown]
# ## Steps
# `Compute` runs an op, `Free` drops a value. (`Offload` and `Fetch` move one to the host and back;
# few solvers use them.)

# %%
steps = result.schedule.steps
print(Counter(type(step).__name__ for step in steps))
list(steps[:8])

# %% [markdown]
# ## The simulator
# Every figure of a schedule comes from `simulate`, which replays it step by step and counts the
# bytes that are live. It refuses a schedule that breaks a rule.

# %%
simulation = result.simulate()
everything = remat.solve(graph, "100%", solver="store_all")
print(simulation)
print(everything.simulate())

# %% [markdown]
# What is live while the plan runs, beside the step that keeps everything. The budget bounds the
# highest point of the plan, and nothing else.

# %%
figure, ax = plt.subplots(figsize=(9, 4), layout="constrained")
_ = draw_live_bytes(ax, graph, result.schedule, unmodified=(graph, everything.schedule))
# %% [markdown]
# ## What holds the memory at the peak

# %%
mib = 2**20
print("while it runs:", steps[simulation.peak_step])
print(f"resident {graph.resident.total_bytes / mib:.2f} MiB")
print(f"workspace of the op {simulation.workspace_at_peak_bytes / mib:.2f} MiB")
figure, ax = plt.subplots(figsize=(9, 4), layout="constrained")
_ = draw_peak_values(ax, graph, result.schedule, top=12)
# %% [markdown]
# ## What is computed again, and where

# %%
counts = result.schedule.computations()
again = [op for op in graph.ops if counts[op.name] > 1]
print(Counter(op.target for op in again).most_common(5))
Counter(op.module for op in again).most_common(5)

# %% [markdown]
# Each row is a layer and each column a run: first runs and recomputations, and behind them what is
# kept.

# %%
figure, ax = plt.subplots(figsize=(9, 4), layout="constrained")
_ = draw_ribbon(ax, graph, result.schedule)
# %% [markdown]
# ## All of it at once
# `explain` says who holds the peak, which op sets the least budget, what a little more memory
# would save, what left no choice, and what simpler rules would cost. `remat show plan.json` and
# `remat show plan.json --explain` do the same for a plan that is kept in a file.

# %%
result.explain(each_s=3)

# %% [markdown]
# ## A schedule of your own
# Anything that lists steps is a schedule. Here the first op runs twice in a row. `simulate` refuses
# that, and says why.

# %%
wrong = type(result.schedule).for_graph(graph, [*steps[:1], *steps])
try:
    remat.Plan.of(graph, wrong)
except remat.RematError as error:
    print(error)
