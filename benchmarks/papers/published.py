"""The published figures, as they were read, and where each stands.

Figures that could not be read at their source are not here. DTR's files name the budgets that were
asked for; its allocator went above them, so the peaks that it reached are the budgets here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import remat
from benchmarks.papers import networks

MB = 10**6
GB = 10**9
DEEPCOMPILE = (
    "[DeepSpeed, pull request 8255, 2026](https://github.com/deepspeedai/DeepSpeed/pull/8255)"
)
_HUB = "https://github.com"
_DTR_AT = "blob/d78eb7062a97d18e80cbb7c303fb8c9f6f72703b/data_files/pareto_results.json"
_CHECKMATE_AT = "blob/1d65ec7dc3863092f4947089d16645faff84647b/mlsys20_artifact.md"
_FASTSA_AT = "paper/2023/hash/9be39b35906526b8d240056daac72c6f-Abstract-Conference.html"
DTR = (
    "[Kirisame et al., DTR, ICLR 2021](https://arxiv.org/abs/2006.09616), "
    f"[its data]({_HUB}/uwsampl/dtr-prototype/{_DTR_AT})"
)
CHECKMATE = (
    "[Jain et al., Checkmate, MLSys 2020](https://arxiv.org/abs/1910.02653), "
    f"[figure 5 in the artifact]({_HUB}/parasj/checkmate/{_CHECKMATE_AT})"
)
FASTSA = (
    f"[Imanishi et al., FastSA, NeurIPS 2023](https://papers.nips.cc/paper_files/{_FASTSA_AT}), "
    "table 1, which repeats [MOCCASIN, ICML 2023](https://arxiv.org/abs/2304.14463)"
)


@dataclass(frozen=True)
class Figure:
    """What was published of a model at one budget.

    Attributes
    ----------
    name : of the row. overhead : over the step that keeps everything; of an ``offload`` job
        over the step that offloads everything.
    budget_bytes : the budget, or the peak that was reached; `budget_share` is its share of the
        published peak where everything is kept, 0 if the bytes count.
    by : the method.
    """

    name: str
    by: str
    overhead: float
    budget_share: float = 0.0
    budget_bytes: int = 0
    order: str = "fixed"


@dataclass(frozen=True)
class Job:
    """A model whose shapes are public, and its published figures.

    Attributes
    ----------
    name : in the command. table : of the page. device : that costs are modelled for.
    make : what `remat.capture` takes, for a network; `file` the instance, for a published graph.
    """

    name: str
    table: str
    device: str
    source: str
    figures: tuple[Figure, ...]
    make: Callable[[], dict[str, Any]] | None = None
    file: str = ""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """More arguments of `remat.capture`."""


def _dtr(name: str, make: Callable[[], dict[str, Any]], *points: tuple[float, float]) -> Job:
    """A model of DTR's: MB at the peak and median ms, first those of the unmodified step."""
    (whole_mb, whole_ms), *rest = points
    figures = tuple(
        Figure(name, "DTR, measured on a Titan V", ms / whole_ms - 1, mb / whole_mb)
        for mb, ms in rest
    )
    return Job(name.partition(",")[0], "dtr", "v100", DTR, figures, make)


def _vgg(batch: int, by: str) -> Job:
    """A batch that a method was found to fit; Checkmate may spend one more forward, a third."""
    made = (Figure(f"VGG-19, batch {batch}", by, 1 / 3, budget_bytes=16 * GB),)
    return Job(f"vgg19-{batch}", "batch", "v100", CHECKMATE, made, lambda: networks.vgg_19(batch))


JOBS = (
    _dtr(
        "ResNet-32, batch 32", lambda: networks.cifar_resnet(32), (120.644608, 13.129216),
        (62.995456, 14.776832), (39.025664, 16.854016), (27.336704, 20.069376),
    ),
    _dtr(
        "DenseNet-BC-100, batch 32", lambda: networks.densenet(32), (1697.799168, 43.190271),
        (875.728384, 52.983297), (535.974656, 55.925247), (368.073216, 59.082752),
    ),
    _dtr(
        "U-Net, batch 4", lambda: networks.bilinear_unet(4), (6845.502976, 273.470978),
        (5739.133440, 294.390274), (5638.470144, 304.970779), (5395.200512, 319.779831),
    ),
    Job(
        "qwen3-14b", "offload", "h200", DEEPCOMPILE,
        (
            Figure(
                "Qwen3 14B, ZeRO-3 over 8, batch 4 x 3,328", "planned offload, measured",
                7.38 / 8.67 - 1, budget_bytes=9 * 141 * GB // 10,
            ),
        ),
        lambda: networks.qwen3(4, 3328),
        options={
            "optimizer": "adamw", "host": "1000GiB",
            "sharding": remat.Sharding("fsdp2", 8, "blocks.*"),
        },
    ),
    _vgg(196, "Chen, root of n"),
    _vgg(260, "Chen, greedy"),
    _vgg(289, "Checkmate"),
    Job(
        "fcn8", "instance", "", FASTSA,
        (
            Figure("FCN8, 90 %", "MOCCASIN", 0.0, budget_bytes=12136315968),
            Figure("FCN8, 80 %", "MOCCASIN", 0.001, budget_bytes=10787836416),
            Figure("FCN8, 70 %", "FastSA", 0.03, budget_bytes=9439356864),
        ),
        file="moccasin_fcn8.json",
    ),
    Job(
        "rl1", "instance", "", FASTSA,
        (
            Figure("random layered, 100 nodes, 90 %", "MOCCASIN", 0.008, budget_bytes=41687),
            Figure("random layered, 100 nodes, 80 %", "MOCCASIN", 0.023, budget_bytes=37055),
            Figure("the same in any order, 80 %", "FastSA", 0.003, 0.0, 37055, "free"),
        ),
        file="moccasin_rl1.json",
    ),
)  # fmt: skip
