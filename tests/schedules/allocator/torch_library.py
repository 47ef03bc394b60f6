"""torch's own allocator, run without a GPU: its libc10_cuda.so over a made-up CUDA runtime.

The library comes with torch's CUDA wheels. Where the installed torch is for CPUs, take three small
files out of the wheel of the same release, and name their folder. The wheel has 527 MB;
`--isolated` keeps pip from an index of CPU wheels.

    pip download torch==2.13.0 --no-deps --isolated -d wheel
    unzip wheel/torch-*.whl torch/version.py 'torch/lib/libc10*.so' -d cuda-torch
    REMAT_CUDA_TORCH=cuda-torch python -m pytest tests/schedules/allocator

gcc and g++ compile `made_up_cuda` against torch's headers, which every wheel has.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from remat.formats import MIB
from remat.schedules.caching_allocator import LARGE_SEGMENT_BYTES, AllocatorSettings
from remat.schedules.reserved import AllocatorReplay

VARIABLE = "REMAT_CUDA_TORCH"
SOURCES = Path(__file__).parent / "made_up_cuda"
NONE_FAILED = -1


def installed() -> Path:
    """Folder of the installed torch."""
    import torch

    return Path(torch.__path__[0])


def library() -> Path:
    """Where libc10_cuda.so is, or would be."""
    named = os.environ.get(VARIABLE)
    folder = Path(named).resolve() / "torch" if named else installed()
    return folder / "lib" / "libc10_cuda.so"


def why_not() -> str:
    """Why torch's library cannot be run here; empty if it can."""
    found = library()
    if not found.exists():
        return (
            f"torch's CUDA allocator is not at {found}: {VARIABLE} names a folder with files of a "
            "CUDA wheel of torch (tests/schedules/allocator/torch_library.py says how to get them)"
        )
    if not (shutil.which("gcc") and shutil.which("g++")):
        return "there are no gcc and g++ to compile the made-up CUDA runtime"
    theirs, ours = release(), _release(installed())
    return "" if theirs == ours else f"{found} is of torch {theirs}, the installed one is {ours}"


def release() -> str:
    """The release of torch that the library is of."""
    return _release(library().parents[1])


def _release(folder: Path) -> str:
    text = (folder / "version.py").read_text(encoding="utf-8")
    found = re.search(r"__version__ = '([\d.]+)", text)
    assert found is not None
    return found.group(1)


def build(folder: Path) -> Path:
    """Compile the made-up runtime and the program that drives the library; the program."""
    found = library()
    runtime = re.search(rb"libcudart\.so\.\d+", found.read_bytes())
    assert runtime is not None
    soname = runtime.group().decode()
    parts = [SOURCES / name for name in ("runtime.c", "driver.c", "unused.c")]
    # The library asks for symbols with a version, which is the runtime's name.
    _shared(folder / soname, parts, f"-Wl,-soname,{soname},--default-symver")
    _shared(folder / "libnvidia-ml.so.1", [SOURCES / "nvml.c"], "-Wl,-soname,libnvidia-ml.so.1")
    program = folder / "drive"
    # The runtime is named first: so it is the one that is loaded, not one beside the library.
    libraries = [folder / soname, found, found.with_name("libc10.so")]
    _run(
        "g++", "-std=c++20", "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE", f"-I{SOURCES / 'include'}",
        f"-I{installed() / 'include'}", SOURCES / "drive.cpp", *libraries, "-o", program,
        f"-Wl,-rpath,{folder}", f"-Wl,-rpath,{found.parent}",
    )  # fmt: skip
    return program


def _shared(target: Path, sources: Sequence[Path], linking: str) -> None:
    include = f"-I{SOURCES / 'include'}"
    _run("gcc", "-std=c11", "-w", "-shared", "-fPIC", include, *sources, "-o", target, linking)


def _run(*command: str | Path) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def conf_text(settings: AllocatorSettings) -> str:
    """`settings` as PYTORCH_ALLOC_CONF has them."""
    parts = ["expandable_segments:True"] if settings.expandable_segments else []
    usual = AllocatorSettings()
    if settings.max_split_bytes != usual.max_split_bytes:
        parts.append(f"max_split_size_mb:{settings.max_split_bytes // MIB}")
    if settings.max_non_split_rounding_bytes != usual.max_non_split_rounding_bytes:
        parts.append(f"max_non_split_rounding_mb:{settings.max_non_split_rounding_bytes // MIB}")
    if settings.roundup_power2_divisions:
        parts.append(f"roundup_power2_divisions:{settings.roundup_power2_divisions}")
    if settings.large_segment_bytes != LARGE_SEGMENT_BYTES:
        parts.append(f"large_segment_size_mb:{settings.large_segment_bytes // MIB}")
    return ",".join(parts)


def served(program: Path, trace: Sequence[int], settings: AllocatorSettings) -> AllocatorReplay:
    """What torch's library says of a trace."""
    done = subprocess.run(
        [program, str(settings.capacity_bytes)],
        input="\n".join(map(str, trace)), capture_output=True, text=True,
        env={
            **os.environ, "PYTORCH_ALLOC_CONF": conf_text(settings),
            "LD_LIBRARY_PATH": str(program.parent),
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *figures, failed = map(int, done.stdout.split())
    return AllocatorReplay(*figures, None if failed == NONE_FAILED else failed)
