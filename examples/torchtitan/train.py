"""Train torchtitan's debug model: `python examples/torchtitan/train.py core remat 70%`.

The trainer is `core` or `graph`, on one process or on ranks (`torchrun`). The policy is `remat`,
`none`, or one of torchtitan's own.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from debug_model import BATCH, TOKENS, debug_config, train
from remat_ac import RematAC
from remat_policy import judged, judged_graph, register
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.experiments.graph_trainer.registry import MEMORY_POLICY_REGISTRY

OWN = {"selective": SelectiveAC, "full": FullAC, "memory-budget": MemoryBudgetAC}


def core_config(policy: str, budget: str, found: dict[str, Any]) -> Any:
    """Of the core's trainer."""
    config = debug_config()
    if policy == "remat":
        config.activation_checkpoint = RematAC.Config(
            budget=budget, batch_size=BATCH, seq_len=TOKENS, found=found
        )
    elif policy != "none":
        config.activation_checkpoint = OWN[policy].Config()
        config.compile.enable = policy == "memory-budget"
    return config


def graph_config(policy: str, budget: str, found: dict[str, Any]) -> Any:
    """Of graph_trainer; what its graph takes is found as the graph is tagged."""
    register(budget)
    tag = MEMORY_POLICY_REGISTRY.get(policy, lambda gm, *, config: gm)

    def tagged(gm: Any, *, config: Any) -> Any:
        plan = judged(tag(gm, config=config))
        found.update(predicted_bytes=plan.peak_bytes, time_us=plan.time_us, again=_again(gm))
        if "budget_bytes" in gm.meta:
            found["budget_bytes"] = gm.meta["budget_bytes"]
        return gm

    MEMORY_POLICY_REGISTRY[policy] = tagged
    config = debug_config(graph=True)
    config.compile.memory_policy = policy
    return config


def _again(gm: Any) -> dict[str, list[str]]:
    """By block, the ops that backward runs again, as ``module:op``; views are none."""
    repeated = {op.name for op in judged_graph(gm).ops if op.name.endswith("_recomputed")}
    found: dict[str, list[str]] = {}
    for node in gm.graph.nodes:
        if f"{node.name}_recomputed" in repeated:
            path = node.meta["custom"]["module_fqn"].split(".")
            block, inside = ".".join(path[:2]), ".".join(path[2:])
            found.setdefault(block, []).append(f"{inside}:{str(node.target).split('.')[1]}")
    return found


def main(trainer: str, policy: str = "none", budget: str = "auto") -> None:
    """Print what came of it, as JSON."""
    found: dict[str, Any] = {}
    make = graph_config if trainer == "graph" else core_config
    losses, measured_bytes = train(make(policy, budget, found))
    print(json.dumps(found | {"losses": losses, "measured_bytes": measured_bytes}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
