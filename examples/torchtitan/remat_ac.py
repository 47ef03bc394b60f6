"""An activation checkpointing policy of torchtitan's core that follows a plan of remat's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.tools.utils import device_type

import remat


class RematAC(ActivationCheckpointing):
    """Each block computes again what the fastest plan within a budget says.

    The plan is made with weights on the device, before `fully_shard`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        """`budget` is of `remat.rematerialize`; `found` gets what the plan says of the step."""

        budget: str = "auto"
        batch_size: int = 8
        seq_len: int = 2048
        param_dtype: str = ""  # of ``mixed_precision_param``, where it is not float32
        found: dict[str, int] = field(default_factory=dict[str, int])

    def apply(self, model: nn.Module) -> None:
        """Replace the blocks of a model that has no storage yet."""
        config: Any = self.config
        shape = config.batch_size, config.seq_len
        device = torch.device(device_type)
        with torch.random.fork_rng(), torch.no_grad():  # torchtitan initialises the weights again
            model.to_empty(device=device)
            model.init_weights(buffer_device=device)
        model.train()
        tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        positions = torch.arange(config.seq_len, device=device).repeat(config.batch_size, 1)
        planned = remat.rematerialize(
            model, (tokens,), {"positions": positions}, blocks="layers.*", budget=config.budget,
            loss_fn=_mean_loss, target=tokens, optimizer="adamw", **_ranks(config.param_dtype),
        )  # fmt: skip
        plan = remat.plans(planned)[0]
        config.found.update(predicted_bytes=plan.peak_bytes, budget_bytes=plan.budget_bytes)
        for name, block in planned.get_submodule("layers").named_children():
            model.get_submodule("layers").register_module(name, block)
        model.to("meta")


def _mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy_loss(logits, labels) / labels.numel()


def _ranks(param_dtype: str) -> dict[str, Any]:
    sharding = remat.Sharding("fsdp2", dist.get_world_size(), param_dtype=param_dtype)
    return {"sharding": sharding, "group": dist.group.WORLD}
