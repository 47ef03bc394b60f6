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
# # Every lever under one budget
# One model, one number of bytes. What does each lever give alone, and what do they give together?
# Each plan is solved within the same budget, with costs of this CPU. Then one is trained, and held
# against eager.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import remat
from remat.graph_capture.devices.memory_events import measure_peak

MIB = 2**20
VOCABULARY, WIDTH, TOKENS, LAYERS = 2048, 128, 512, 12


class Texts(nn.Module):
    """Residual layers with dropout over tokens, and a head with a large vocabulary."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(),
                nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1),
            )
            for _ in range(LAYERS)
        )  # fmt: skip
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, targets):
        """The mean loss over all tokens."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x), targets)


def made():
    """The model and a batch, the same each time."""
    torch.manual_seed(0)
    batch = torch.randint(VOCABULARY, (TOKENS,)), torch.randint(VOCABULARY, (TOKENS,))
    return Texts(), batch


# %% [markdown]
# ## The step, with what a lever needs
# `split="exact"` lets the head and its loss run in chunks, to eager's bits. `host=` lets values
# wait outside the device; on a CPU, files without names stand for it. `optimizer_in_backward=`
# updates each parameter as soon as its gradient is there. All of it counts the state of AdamW.


# %%
def graph_of(chunks=False, updates=False, host=False):
    """The captured step."""
    model, batch = made()
    split = "exact" if chunks else "none"
    if updates:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        fast = remat.rematerialize(
            model, batch, optimizer_in_backward=optimizer, budget="100%", split=split, check=False
        )
        return remat.plans(fast)[0].step
    room = "1GiB" if host else None
    return remat.capture(model, batch, optimizer="adamw", split=split, host=room)


unmodified = remat.solve(graph_of(), "100%", solver="store_all")
BUDGET = unmodified.peak_bytes * 55 // 100
print(f"unmodified {unmodified.peak_bytes / MIB:.1f} MiB, the budget {BUDGET / MIB:.1f} MiB")

# %% [markdown]
# ## Each alone, then together
# Where nothing may be recomputed, all modules are pinned: `keep=["*"]`. Files that fit into free
# memory are a fast host, so copies are cheap here; over a GPU's link they are not.

# %%
ways = {
    "recompute": ((), {}),
    "chunks": ("*", {"chunks": True}),
    "optimizer in backward": ("*", {"updates": True}),
    "host memory": ("*", {"host": True}),
    "recompute + chunks": ((), {"chunks": True}),
    "recompute + chunks + updates": ((), {"chunks": True, "updates": True}),
    "recompute + chunks + host": ((), {"chunks": True, "host": True}),
}
budgets = [BUDGET, *(unmodified.peak_bytes * share // 100 for share in (70, 85, 100))]
fronts = {}
print(f"{'':30}{'peak, MiB':>10}{'overhead':>10}{'gap':>8}")
for name, (kept, levers) in ways.items():
    fronts[name] = remat.sweep(graph_of(**levers), budgets, time_limit_s=40, keep=kept)
    result = next(iter(fronts[name]))
    figures = "      does not fit"
    if result.schedule:
        figures = f"{result.peak_bytes / MIB:10.1f}{100 * result.overhead:8.1f} %"
        figures += f"{100 * result.gap:6.1f} %" if result.gap is not None else "  unproved"
    print(f"{name:30}{figures}")

# %% [markdown]
# What each costs as the budget falls. A line ends where nothing was found that fits.

# %%
figure, ax = plt.subplots(figsize=(9, 4), layout="constrained")
for (name, front), marker in zip(fronts.items(), "o^vsDPX", strict=True):
    plans = [plan for plan in front if plan.schedule]
    peaks = [plan.peak_bytes / MIB for plan in plans]
    overheads = [100 * plan.overhead for plan in plans]
    ax.plot(peaks, overheads, marker=marker, ms=6, alpha=0.8, label=name)
ax.axvline(BUDGET / MIB, color="#c0392b", ls="--", label="the budget")
ax.set(xlabel="peak (MiB)", ylabel="overhead (%)")
_ = ax.legend(frameon=False)

# %% [markdown]
# ## In training
# The loop is as ever. Losses and parameters after three steps are eager's to the bit, and the
# measured peak is within the budget.


# %%
def trained(module, optimizer, batch):
    """Losses of three steps."""
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        loss = module(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


(model, batch), (eager, _) = made(), made()
fast = remat.rematerialize(
    model, batch, budget=BUDGET, split="exact", host="1GiB", optimizer="adamw", check=False
)
optimizers = [torch.optim.AdamW(one.parameters(), fused=True) for one in (fast, eager)]
print(trained(fast, optimizers[0], batch) == trained(eager, optimizers[1], batch))
print(all(map(torch.equal, fast.parameters(), eager.parameters())))
held_bytes = remat.plans(fast)[0].step.resident.total_bytes
peak_bytes = held_bytes + measure_peak(lambda: fast(*batch).backward())
print(f"{peak_bytes / MIB:.1f} MiB measured, {BUDGET / MIB:.1f} MiB allowed")
