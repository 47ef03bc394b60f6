"""Private parts of AOTAutograd and dynamo. To import them takes seconds."""

# ruff: noqa: F401
# pyright: reportUnusedImport=false

from __future__ import annotations

from remat.graph_capture.devices.memory_events import without_garbage

with without_garbage():  # to look for garbage among the new objects takes a fifth
    from torch._C._dynamo.guards import GuardManager, RootGuardManager, dict_version
    from torch._dynamo import compiled_autograd, symbolic_convert
    from torch._dynamo import config as dynamo_config
    from torch._dynamo.backends.distributed import SubmodCompiler
    from torch._dynamo.convert_frame import ConvertFrameAssert
    from torch._dynamo.exc import Unsupported, UserError
    from torch._dynamo.guards import GuardManagerType
    from torch._dynamo.resume_execution import ContinueExecutionCache
    from torch._dynamo.source import ConstantSource
    from torch._dynamo.utils import to_fake_tensor
    from torch._functorch import config as functorch_config
    from torch._functorch._aot_autograd.schemas import (
        MemoryFormatMeta,
        OutputType,
        PlainTensorMeta,
        ViewAndMutationMeta,
    )
    from torch._functorch.aot_autograd import (
        JointWithDescriptors,
        aot_compile_joint_with_descriptors,
        aot_export_joint_with_descriptors,
    )
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch.fx._lazy_graph_module import _use_lazy_graph_module as lazy_graph_modules
    from torch.utils._sympy.functions import Max
    from torch.utils._sympy.printers import PythonPrinter
    from torch.utils._sympy.value_ranges import bound_sympy
