"""Writes the table of docs/distributed.md: `python -m tests.distributed.ways`.

python -m tests.distributed.ways                        # all of them, and the page
python -m tests.distributed.ways 'D:three steps' ...    # these alone; nothing is written
"""

from __future__ import annotations

import sys

from tests.distributed.ways.table import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
