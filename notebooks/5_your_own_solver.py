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
# # A solver of your own
# A solver is one frozen dataclass with `solve(graph, budget_bytes) -> Result`, and one line in the
# table of solvers. This notebook writes one, enters it, and has it judged beside the others.

# %%
from dataclasses import dataclass

import torch
from torch import nn

import remat
from remat.solver import TABLE, Result
from remat.solver.policies.template import (
    Template,
    read_in_backward,
    template_sequence,
    unavoidable,
)
from remat.solver.problem import Problem
from remat.solver.search import Listener, Search

# %% [markdown]
# ## The rule
# Sort the values that backward reads by what each byte costs to compute again, the dearest first.
# Keep all of them, then fewer and fewer, until the step fits. `Problem` is the graph in integers. A
# `Template` says which values forward keeps. `Search` has `simulate` judge each schedule that it is
# offered, and remembers the fastest that fits.


# %%
@dataclass(frozen=True)
class DearestBytes:
    """Keeps the values that cost most to make again for each byte."""

    time_limit_s: float = 60.0
    progress: Listener | None = None

    def solve(self, graph: remat.Step, budget_bytes: int) -> Result:
        """The fastest schedule of the rule whose peak is within the budget."""
        search = Search.of(self, "dearest_bytes", graph, budget_bytes)
        search.offer_sequence(range(search.problem.n_ops), or_least=True)
        wanted = dearest_first(search.problem)
        for count in range(len(wanted), -1, -max(len(wanted) // 32, 1)):
            sequence = template_sequence(search.problem, keeping(search.problem, wanted[:count]))
            search.offer_sequence(sequence, or_least=True)
            if search.best or search.out_of_time():
                break
        return search.result()


def dearest_first(problem: Problem) -> list[int]:
    """Values that backward reads, by the cost of their op for each byte."""
    return sorted(
        read_in_backward(problem),
        key=lambda v: -problem.cost_us[problem.producer[v]] / max(problem.size_bytes[v], 1),
    )


def keeping(problem: Problem, values: list[int]) -> Template:
    """The template that keeps those, and what cannot be made again."""
    kept = unavoidable(problem)
    for v in values:
        kept[v] = 1
    return Template(kept, just_in_time=True)


# %% [markdown]
# ## The line in the table
# In the package it is a line of `solver/table.py`; here the class is in this notebook.

# %%
TABLE["dearest_bytes"] = f"{DearestBytes.__module__}:DearestBytes"

# %% [markdown]
# ## Beside the others
# It has a name now, so whatever takes a solver takes this one: `solve`, pins, `sweep`, `compare`.

# %%
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True, norm_first=True)
model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
x, y = torch.randn(4, 64, 64), torch.randn(4, 64, 64)
loss_fn = nn.functional.mse_loss
graph = remat.capture(model, (x,), loss_fn=loss_fn, target=y)

remat.sweep(graph, ["50%", "65%", "80%"], solvers=["dearest_bytes", "auto", "full"], time_limit_s=6)

# %% [markdown]
# Every figure there is one of the simulator, `simulate`, and the bound holds for every solver.

# %%
mine, best = (remat.solve(graph, "80%", solver=name) for name in ("dearest_bytes", "auto"))
simulation = mine.simulate()
assert simulation.peak_bytes == mine.peak_bytes <= mine.budget_bytes
assert simulation.time_us == mine.time_us >= best.lower_bound_us
print(f"{100 * (mine.time_us / best.lower_bound_us - 1):.2f} % above the bound")

# %% [markdown]
# ## And it trains
# A schedule is a schedule, whoever made it: it is rewritten and checked like any other.

# %%
fast = mine.apply(model)
found = remat.check(model, fast, (x,), loss_fn=loss_fn, target=y, steps=2)
assert found.equal
print(f"{found.gradients} of {found.gradients_total} gradients are equal to the last bit")
print(f"peak {found.plan_peak_bytes} of {mine.budget_bytes} bytes")

# %% [markdown]
# To bring it into the package, write one file `solver/policies/dearest_bytes.py`, whose docstring
# says what it solves, at what cost, and where it is weak, and add the line to `TABLE`. The tests
# over the table take it from there. [`CONTRIBUTING.md`](../../CONTRIBUTING.md) has the steps.
