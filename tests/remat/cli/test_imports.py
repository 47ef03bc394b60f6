from __future__ import annotations

import subprocess
import sys

import pytest

import remat
from remat.ranks.same_order import agreed_rewrite


@pytest.mark.parametrize("name", ["remat", "remat.solver", "remat.schedules", "remat.cli.main"])
def test_importing_leaves_torch_out(name: str) -> None:
    code = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_importing_takes_no_time_and_its_packages_are_there_when_asked_for() -> None:
    code = (
        "import sys, remat; assert 'numpy' not in sys.modules; "
        "assert [name for name in sys.modules if name.startswith('remat.')] == ['remat.checkout']; "
        "remat.solver.TABLE, remat.schedules.simulate"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_importing_leaves_pythons_random_stream() -> None:
    code = (
        "import random, sys; before = random.getstate(); import remat, remat.progress; "
        "assert 'rich.style' in sys.modules and random.getstate() == before"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_is_there() -> None:
    for name in remat.__all__:
        assert getattr(remat, name) is not None
    assert callable(remat.check)
    assert callable(agreed_rewrite)
    with pytest.raises(AttributeError, match="no attribute 'solv'"):
        remat.solv  # noqa: B018
