"""Published cluster jobs: their sizes, their mesh, and what was published of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from remat.cluster.mesh import ClusterRequest, MeshSpec

MODELS = "benchmarks.cluster_models"
FAMILIES = "benchmarks.cluster.families"
H800 = Path(__file__).parent / "links_h800.json"
KORTHIKANTI = "Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198, table 5 *"
TITAN = "torchtitan, 2024-12, benchmarks/llama3_h100_202412_torchtitan.md"
YUAN = "Yuan et al. 2024, the artifact's README *"
MOSAIC = "llm-foundry, scripts/train/benchmarking/README.md, H100 80GB BF16, MPT of these sizes"
LLAMA = "Llama 3, 2024, https://arxiv.org/abs/2407.21783, table 4 *"
"""Figures of sources that end with * were not read again for this table."""
NO_SOURCE = "no table that we know"
WHOLE_80GB = "72GiB"
HALF_AGAIN, ALL_AGAIN = "every second product of a block", "all of each block"


@dataclass(frozen=True)
class PublishedJob:
    """A job with its mesh, and what was published of it.

    Attributes
    ----------
    step_s, mfu : as published; None where they were not. budget : of a GPU.
    models : the module of its factory. again : what the job computes again by a rule of its own,
        where the source says so and `rule.py` knows it.
    """

    name: str
    model: str
    gpus: int
    batch: int
    seq: int
    device: str
    mesh: MeshSpec
    source: str
    step_s: float | None = None
    mfu: float | None = None
    links: Path | None = None
    budget: str = WHOLE_80GB
    again: str = ""
    models: str = MODELS

    @property
    def factory(self) -> str:
        """As `remat cluster` takes it."""
        return f"{self.models}:{self.model}"

    def request(self, asked: MeshSpec) -> ClusterRequest:
        """Of Megatron's kind, with receive buffers for microbatches in flight; torchtitan's not."""
        return ClusterRequest(
            self.gpus, self.batch, self.seq, self.device, 8, self.budget, self.links, asked,
            receive_ring=self.source in (KORTHIKANTI, YUAN, LLAMA),
        )  # fmt: skip


def _megatron(
    name: str, gpus: int, mesh: MeshSpec, step_s: float | None, mfu: float, batch: int = 0
) -> PublishedJob:
    model = "gpt_" + name.split("-")[1]
    return PublishedJob(
        name, model, gpus, batch or gpus, 2048, "a100", mesh, KORTHIKANTI, step_s, mfu
    )


def _interleaved(
    tp: int, cp: int, pp: int, microbatch: int, virtual_stages: int | None = None
) -> MeshSpec:
    return MeshSpec(tp, cp, pp, microbatch, virtual_stages, schedule="Interleaved1F1B")


def _titan(gpus: int, step_s: float, name: str = "llama3-8b") -> PublishedJob:
    """Eager, without float8. Its card is of the table; the MFU that it states is of another one."""
    return PublishedJob(
        f"{name}-{gpus}", name.replace("-", "_"), gpus, 2 * gpus, 8192, "h100-hbm2e",
        MeshSpec(1, 1, 1, 2), TITAN, step_s, budget="80GiB", again=HALF_AGAIN,
        models=FAMILIES if name.startswith("hf") else MODELS,
    )  # fmt: skip


def _mosaic(size: str, gpus: int, microbatch: int, batch: int, tokens_per_s: int) -> PublishedJob:
    """FSDP, nothing computed again."""
    return PublishedJob(
        f"opt-{size}-{gpus}", f"opt_{size}", gpus, batch, 2048, "h100",
        MeshSpec(1, 1, 1, microbatch), MOSAIC, batch * 2048 / tokens_per_s, models=FAMILIES,
    )  # fmt: skip


def _unpublished(
    model: str, seq: int, microbatch: int, each: int, on: tuple[int, ...] = (8, 64)
) -> Iterator[PublishedJob]:
    """With `each` sequences for a GPU."""
    for gpus in on:
        name = f"{model.replace('_', '-')}-{gpus}"
        mesh = MeshSpec(1, 1, 1, microbatch)
        yield PublishedJob(
            name, model, gpus, gpus * each, seq, "h100", mesh, NO_SOURCE, models=FAMILIES
        )


# The paper names three virtual stages a rank for 175B and 530B, and none for 1T: those are chosen.
# None of these had its gradients of weights apart.
JOBS = (
    _megatron("gpt-22b", 8, MeshSpec(8, 1, 1, 4), 1.10, 0.415, batch=4),
    _megatron("gpt-175b", 64, _interleaved(8, 1, 8, 1, 3), 13.75, 0.514),
    _megatron("gpt-530b", 280, _interleaved(8, 1, 35, 1, 3), 37.83, 0.56),
    _megatron("gpt-1t", 512, _interleaved(8, 1, 64, 1), 71.49, 0.563),
    _megatron("gpt-530b-2240", 2240, _interleaved(8, 1, 35, 1, 3), None, 0.542),
    PublishedJob(
        "llama-175b", "llama_175b", 256, 256, 8192, "h100", MeshSpec(2, 2, 16, 1, 1), YUAN, 27.4,
        0.334, H800, again=ALL_AGAIN,
    ),
    _titan(8, 2.844),
    _titan(128, 2.923),
    PublishedJob(
        "llama3-405b", "llama3_405b", 8192, 2048, 8192, "h100", _interleaved(8, 1, 16, 1), LLAMA,
        None, 0.43,
    ),
    _titan(8, 2.844, "hf-llama3-8b"),
    _mosaic("1b", 8, 14, 112, 363645),
    _mosaic("3b", 64, 6, 1152, 1441663),
    _mosaic("7b", 8, 6, 48, 85144),
    _mosaic("13b", 8, 2, 16, 38336),
    _mosaic("13b", 64, 2, 128, 307209),
)  # fmt: skip
# AdamW's states of Mixtral 8x7B and of Qwen3-30B-A3B are too large for 8 GPUs.
UNPUBLISHED = tuple(chain.from_iterable((
    _unpublished("hf_llama3_8b", 8192, 2, 2, (64,)), _unpublished("qwen3_8b", 4096, 1, 4),
    _unpublished("gemma3_12b", 4096, 1, 4), _unpublished("gpt2_xl", 1024, 4, 8),
    _unpublished("mixtral_8x7b", 4096, 1, 2, (64,)),
    _unpublished("mixtral_8x7b_lora", 4096, 2, 2), _unpublished("qwen2_moe_a2_7b", 4096, 2, 2),
    _unpublished("qwen3_30b_a3b", 4096, 1, 2, (64,)), _unpublished("vit_huge", 1, 8, 32),
    _unpublished("bert_large", 512, 8, 32), _unpublished("t5_3b", 512, 4, 8),
    _unpublished("bart_large", 1024, 4, 8),
)))  # fmt: skip
"""Families of transformers, planned in the same way, with no published step beside them."""
