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
# # Every lever beside recomputation
# Recomputation is one way to fit a step. Others are a head and its loss in chunks, updates during
# backward, and an arena without gaps. This page takes them one after another, then together.
# Each peak is predicted by the simulator, and measured on this CPU beside it.

# %%
import torch
from torch import nn

import remat
from remat.graph_capture.devices.memory_events import measure_peak

MIB = 2**20
VOCABULARY, WIDTH, TOKENS = 4096, 128, 256


class Texts(nn.Module):
    """Residual layers over tokens, and a head with a large vocabulary."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, targets):
        """The mean loss over all tokens."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x), targets)


def made():
    """The model, its optimizer and a batch, the same each time."""
    torch.manual_seed(0)
    model = Texts()
    batch = torch.randint(VOCABULARY, (TOKENS,)), torch.randint(VOCABULARY, (TOKENS,))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), batch


def step_of(module, optimizer, batch):
    """A whole step: forward, backward, update."""

    def step():
        module(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


# %% [markdown]
# ## The unmodified step

# %%
model, optimizer, batch = made()
step = step_of(model, optimizer, batch)
step()
eager_bytes = measure_peak(step)
print(f"eager: {eager_bytes / MIB:.1f} MiB above what lives between steps")

# %% [markdown]
# ## One lever after another
# `budget="min"` takes the least peak that is known. `split="exact"` lets the head and its loss run
# in chunks, to eager's bits. `optimizer_in_backward=` updates each parameter as its gradient is
# there. The least peaks cost the most time.


# %%
def planned(split, updates):
    """The module with these levers, and its step."""
    model, optimizer, batch = made()
    options = {"budget": "min", "split": split, "time_limit_s": 2, "check": False}
    if updates:
        fast = remat.rematerialize(model, batch, optimizer_in_backward=optimizer, **options)
    else:
        fast = remat.rematerialize(model, batch, **options)
    return fast, step_of(fast, optimizer, batch)


names = {
    "recompute": ("none", False),
    "and chunks": ("exact", False),
    "and the optimizer": ("none", True),
    "all together": ("exact", True),
}
modules = {}
print(f"{'':22}{'predicted':>10}{'measured':>10}{'overhead':>10}")
for name, levers in names.items():
    fast, step = planned(*levers)
    step()
    plan = remat.plans(fast)[0]
    found = plan.simulate()
    predicted_bytes = found.peak_bytes - plan.step.resident.total_bytes
    figures = f"{predicted_bytes / MIB:10.2f}{measure_peak(step) / MIB:10.2f}"
    print(f"{name:22}{figures}{100 * found.overhead:9.1f} %")
    modules[name] = plan

# %% [markdown]
# ## The arena
# An allocator takes more than what is live. A layout says how little it could take.

# %%
for name, plan in modules.items():
    layout = plan.layout()
    print(f"{name:22}{layout.arena_bytes / MIB:8.2f} MiB, {100 * layout.gap:.2f} % above the load")

# %% [markdown]
# ## The bits
# Three steps with all levers give the parameters of three eager steps.

# %%
eager, others, batch = made()
for _ in range(3):
    step_of(eager, others, batch)()
fast, step = planned("exact", updates=True)
for _ in range(3):
    step()
print(all(map(torch.equal, eager.parameters(), fast.parameters())))
