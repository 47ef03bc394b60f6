"""What torch says where it cannot trace something, in words that say what to do.

Torch's own messages speak of stand-ins for tensors, which a user has never made.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch._subclasses import FakeTensor

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.over_ranks.dtensors import is_distributed

_SAID = {
    ".numpy() is not supported": (
        "forward hands a tensor to NumPy, and a graph holds torch's ops alone. Compute it with "
        "torch; or outside forward, and pass what comes of it"
    ),
    "passed to FunctionalTensor.__format__": (
        "forward writes the value of a tensor into a text, and a trace has no values. Do it "
        "outside forward, with a tensor that forward returns"
    ),
    "Cannot access data pointer": (
        "forward asks where a tensor lies in memory, by data_ptr, DLPack or an extension's code, "
        "and a trace has no memory. Make the code an op: torch.library.custom_op, with a "
        "register_fake and a register_autograd"
    ),
    "support the deepcopy protocol": (
        "forward copies a module or a tensor by copy.deepcopy. Make the copy outside forward, and "
        "keep it on the model"
    ),
    "Attempting to use FunctionalTensor on its own": (
        "forward runs ops in another thread, or on a tensor that an earlier call has kept where "
        "nothing sees it, and torch traces neither. Run them one after the other, and keep tensors "
        "on attributes of modules"
    ),
    "Encountered a set_ on a graph input": (
        "forward gives a parameter, a buffer or an argument other data by set_(), and in a step of "
        "a plan it would keep what it has. Write into the tensor instead: tensor.data.copy_(other)"
    ),
    "shape_env must not be None": (
        "forward makes a nested tensor, whose sizes are data, and a plan holds for one size. Pad "
        "to one length, and mask"
    ),
    "use_reentrant=True, torch.utils.checkpoint": (
        "forward calls torch.utils.checkpoint with use_reentrant=True, which runs in a whole "
        "backward alone, and a trace asks for single gradients. Switch it off, as in transformers "
        "model.activation_checkpointing_disable(), in older ones "
        "model.gradient_checkpointing_disable(): a plan recomputes by itself. Or give "
        "use_reentrant=False"
    ),
    "mutating a non-functional tensor": (
        "forward writes into a tensor that is neither a parameter, a buffer nor an argument. "
        "Register it as a buffer of the model, or pass it to forward; if a batch norm in training "
        "mode does so, make its module a submodule, or call eval() on it"
    ),
    "expected to have an entirely functional graph": (
        "forward writes into a tensor that is neither a parameter, a buffer nor an argument. "
        "Register it as a buffer of the model (register_buffer), or pass it to forward"
    ),
    "Unexpected fake buffer": (
        "forward keeps a tensor of one call for the next one where nothing sees it. Keep it on an "
        "attribute of a module, or call the model once on a batch, then plan"
    ),
}
"""By a part of what torch says."""


def in_words(said: str) -> str:
    """What is wrong and what to do; empty where torch's own words are all there is."""
    return next((words for part, words in _SAID.items() if part in said), "")


def refuse_subclass(what: str, tensor: Tensor) -> None:
    """Raise `CaptureError` for a tensor of a class of its own, whose ops torch cannot trace."""
    if is_distributed(tensor):
        raise CaptureError(
            f"{what} is a DTensor, and only parameters may be: keep and pass its local part "
            "(.to_local()), and return that (use_local_output=True of the parallel style)"
        )
    if type(tensor) is not Tensor and not isinstance(tensor, (nn.Parameter, FakeTensor)):
        raise CaptureError(
            f"{what} is a {type(tensor).__name__}, a subclass of torch.Tensor that cannot be "
            "traced: use .as_subclass(torch.Tensor) of it, if its values are all that counts"
        )
