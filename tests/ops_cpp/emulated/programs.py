"""What the CPUs run: the kernels' object files of the release build, linked in two ways; nothing is compiled again."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.ops_cpp.objects import Object, release_objects

HERE = Path(__file__).parent


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def kernel_objects() -> list[Object]:
    """The object files of all kernels."""
    return [made for made in release_objects() if made.source.parent.parent.name == "kernels"]


def avx512_objects() -> list[Object]:
    """Those that only CPUs with AVX-512 can run."""
    return [made for made in kernel_objects() if "-mavx512f" in made.flags]


def link_image(folder: Path) -> Path:
    """The AVX-512 kernels for a computer without operating system; any other function they call is an error here."""
    _run(
        *("gcc", "-O2", "-ffreestanding", "-fno-tree-loop-distribute-patterns", "-fno-stack-protector"),
        *("-c", HERE / "freestanding.c", "-o", folder / "freestanding.o"),
    )
    objects = [made.path for made in avx512_objects()]
    image = folder / "image"
    _run("gcc", "-static", "-no-pie", "-nostdlib", "-Wl,-e,0", "-o", image, folder / "freestanding.o", *objects)
    return image


def link_library(folder: Path) -> Path:
    """All kernels for this computer."""
    library = folder / "kernels.so"
    _run("g++", "-shared", "-Wl,-z,defs", "-o", library, *[made.path for made in kernel_objects()])
    return library


def link_wheel(folder: Path) -> Path:
    """What is preloaded into the emulator, see wheel.c."""
    wheel = folder / "wheel.so"
    _run("gcc", "-shared", "-fPIC", "-o", wheel, HERE / "wheel.c", "-ldl")
    return wheel
