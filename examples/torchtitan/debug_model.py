"""torchtitan's debug model on a CPU: its trainers, random tokens, and what a step has live.

torchtitan knows no CPU, and its attention (FlexAttention) has no backward there: this names a
device module, and takes the scaled dot product that graph_trainer's own tests take.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torchtitan.tools.utils as device_utils
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

# Before any other module of torchtitan reads it.
device_utils.device_type = "cpu"
device_utils.device_module = SimpleNamespace(
    **vars(torch.cpu) | {"current_device": lambda: 0, "get_device_name": lambda _: "CPU"},
    get_device_properties=lambda _: SimpleNamespace(total_memory=1 << 40),
    memory_stats=lambda _: {}, reset_peak_memory_stats=lambda: None, empty_cache=lambda: None,
)  # fmt: skip

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.experiments.graph_trainer.llama3 import config_registry  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel_ce_loss  # noqa: E402

from remat.graph_capture.devices.memory_events import measure_peak  # noqa: E402
from remat.graph_capture.tracing.resident import storage_bytes  # noqa: E402

VOCABULARY, BATCH, TOKENS, STEPS = 2048, 4, 512, 10
NOT_HERE = "cudagraph_pass", "joint_transformer_block_bucketing_reordering_pass"
"""Passes of graph_trainer that ask for a GPU."""


class RandomTokens(BaseDataLoader):
    """Others on each rank, with the positions that torchtitan's own loaders give."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, **_: Any) -> None:
        self.generator = torch.Generator().manual_seed(dp_rank)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            text = torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=self.generator)
            positions = torch.arange(TOKENS).repeat(BATCH, 1)
            yield {"input": text[:, :-1].contiguous(), "positions": positions}, text[:, 1:].clone()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    encode = decode = get_vocab_size = lambda *_, **__: 0


def debug_config(*, graph: bool = False) -> Any:
    """Ten steps, of the core's trainer or of graph_trainer, with nothing checkpointed."""
    if graph:
        config = config_registry.graph_trainer_llama3_debugmodel_sdpa_cross_entropy_loss()
        config.compile.disable_passes = list(NOT_HERE)
    else:
        config = llama3_debugmodel_ce_loss()
        config.parallelism.spmd_backend = "partial_dtensor"
        for layer in config.model_spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.dataloader, config.tokenizer = RandomTokens.Config(), NoTokenizer.Config()
    config.training.local_batch_size, config.training.seq_len = BATCH, TOKENS
    config.training.steps, config.training.disable_cuda_graphs = STEPS, True
    config.training.mixed_precision_param = "float32"
    config.checkpoint.enable = config.validator.enable = False
    config.activation_checkpoint, config.debug.seed = None, 0
    config.dump_folder = tempfile.gettempdir()
    return config


def train(config: Any) -> tuple[list[float], int]:
    """The loss of each step, and the most bytes that a step has live, with what stays."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"} | os.environ
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"} | os.environ
    trainer, losses, peaks = config.build(), list[float](), list[int]()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale what it sums
    trainer.metrics_processor.log = lambda step, loss, *_, **__: losses.append(loss)
    whole_step: Callable[..., None] = trainer.train_step

    def measured(batches: Any) -> None:
        if trainer.step == 1:  # the optimizer makes its state
            whole_step(batches)
        else:
            trainer.optimizers.zero_grad()
            peaks.append(_resident_bytes(trainer) + measure_peak(lambda: whole_step(batches)))

    trainer.train_step = measured
    trainer.train()
    trainer.close()
    return losses, min(peaks)  # the profiler misses what gloo's threads free, so some look higher


def _resident_bytes(trainer: Any) -> int:
    (model,), optimizers = trainer.model_parts, list(trainer.optimizers)
    states = [tensor for one in optimizers for of in one.state.values() for tensor in of.values()]
    tensors = [*model.parameters(), *model.buffers(), *states]
    return storage_bytes([getattr(tensor, "_local_tensor", tensor) for tensor in tensors])
