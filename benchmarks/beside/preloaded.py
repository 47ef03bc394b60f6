"""What rows import and find out while they compile, done once before they are forked."""

from __future__ import annotations

from torch._inductor.cpu_vec_isa import pick_vec_isa

import remat.api
import remat.compile_backend  # noqa: F401

pick_vec_isa()
