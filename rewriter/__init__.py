"""From a schedule back to a module that trains."""

from remat.graph_capture.torch_private.core import require_tested_release

require_tested_release()
