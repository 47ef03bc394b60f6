"""State of the process that forward reads: how it reads a number, and how that changes."""

from __future__ import annotations

import gc
import logging
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.rewriter.checking.state_of_objects import Change, Read

SCALE: Any = 1.0
_here = sys.modules[__name__]
_made = types.ModuleType("tests_state_of_a_made_module")
sys.modules[_made.__name__] = _made
_cache: dict[str, Any] = {}


def global_number(x: Tensor) -> tuple[Read, Change]:
    _here.SCALE = 1.0
    return lambda _: SCALE, lambda: setattr(_here, "SCALE", 2.0)


def global_cache(x: Tensor) -> tuple[Read, Change]:
    _cache["scale"] = 1.0
    return lambda _: _cache["scale"], lambda: _cache.update(scale=2.0)


def number_of_a_module(x: Tensor) -> tuple[Read, Change]:
    _made.scale = 1.0
    return lambda _: sys.modules[_made.__name__].scale, lambda: setattr(_made, "scale", 2.0)


def function_of_a_module(x: Tensor) -> tuple[Read, Change]:
    _made.scaled = lambda x: x
    return lambda x: _made.scaled(x), lambda: setattr(_made, "scaled", lambda x: 2 * x)


def environment_variable(x: Tensor) -> tuple[Read, Change]:
    os.environ["TESTS_SCALE"] = "1.0"
    return lambda _: float(os.environ["TESTS_SCALE"]), lambda: os.environ.update(TESTS_SCALE="2")


def environment_variable_by_a_name_put_together(x: Tensor) -> tuple[Read, Change]:
    os.environ["TESTS_SCALE_2"] = "1.0"
    name = "_".join(["TESTS", "SCALE"])
    return (
        lambda _: float(os.environ[f"{name}_{2}"]),
        lambda: os.environ.update(TESTS_SCALE_2="2"),
    )


def file_that_forward_reads(x: Tensor) -> tuple[Read, Change]:
    path = Path(os.environ["TESTS_FOLDER"], "scale.txt")
    path.write_text("1.0")
    return lambda _: float(path.read_text()), lambda: path.write_text("2.0")


def file_that_is_there(x: Tensor) -> tuple[Read, Change]:
    path = Path(os.environ["TESTS_FOLDER"], "flag")
    return lambda _: 2.0 if path.exists() else 1.0, path.touch


def working_directory(x: Tensor) -> tuple[Read, Change]:
    return lambda _: float(len(os.getcwd())), lambda: os.chdir("/")


def level_of_a_logger(x: Tensor) -> tuple[Read, Change]:
    one = logging.getLogger("tests.audit")
    one.setLevel(10)
    return lambda _: one.level / 10, lambda: one.setLevel(20)


def collector_of_garbage(x: Tensor) -> tuple[Read, Change]:
    gc.set_threshold(10_000, 20, 20)
    return lambda _: gc.get_threshold()[1] / 10, lambda: gc.set_threshold(10_000, 30, 20)


def deepest_recursion(x: Tensor) -> tuple[Read, Change]:
    now = sys.getrecursionlimit()
    return lambda _: sys.getrecursionlimit() / now, lambda: sys.setrecursionlimit(2 * now)


def errors_of_numpy(x: Tensor) -> tuple[Read, Change]:
    return (
        lambda _: 2.0 if np.geterr()["divide"] == "ignore" else 1.0,
        lambda: np.seterr(divide="ignore"),
    )


def default_dtype(x: Tensor) -> tuple[Read, Change]:
    return lambda _: torch.ones(4), lambda: torch.set_default_dtype(torch.float64)


def precision_of_products(x: Tensor) -> tuple[Read, Change]:
    return (
        lambda _: 2.0 if torch.get_float32_matmul_precision() == "high" else 1.0,
        lambda: torch.set_float32_matmul_precision("high"),
    )


def number_of_threads_between_ops(x: Tensor) -> tuple[Read, Change]:
    return lambda _: torch.get_num_threads(), lambda: torch.set_num_threads(3)


def kernels_of_attention(x: Tensor) -> tuple[Read, Change]:
    return (
        lambda _: 2.0 if torch.backends.cuda.flash_sdp_enabled() else 1.0,
        lambda: torch.backends.cuda.enable_flash_sdp(False),
    )


def flag_of_a_backend(x: Tensor) -> tuple[Read, Change]:
    return (
        lambda _: 2.0 if torch.backends.cudnn.benchmark else 1.0,
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
    )


def deterministic_algorithms(x: Tensor) -> tuple[Read, Change]:
    return (
        lambda _: 2.0 if torch.are_deterministic_algorithms_enabled() else 1.0,
        lambda: torch.use_deterministic_algorithms(True),
    )


def function_of_torch(x: Tensor) -> tuple[Read, Change]:
    relu = functional.relu
    return lambda x: functional.relu(x), lambda: setattr(functional, "relu", lambda x: 2 * relu(x))


def method_of_a_layer_of_torch(x: Tensor) -> tuple[Read, Change]:
    layer, forward = nn.Softplus(), nn.Softplus.forward
    return lambda x: layer(x), lambda: setattr(
        nn.Softplus, "forward", lambda self, x: 2 * forward(self, x)
    )
