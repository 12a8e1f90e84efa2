"""Third-party packages of kernels: whether one is installed here, and the package itself, imported at first use."""

import functools
import importlib
import importlib.util
import pathlib
from types import ModuleType

import torch

from workload.errors import Unsupported


@functools.cache
def installed(module: str) -> str | None:
    """None where a top-level module, or TOP.SUB, is on the path, else the reason. Imports nothing."""
    top, _, sub = module.partition(".")
    spec = importlib.util.find_spec(top)
    places = (spec.submodule_search_locations or ()) if spec else ()
    found = spec and (not sub or any((pathlib.Path(place) / sub).exists() for place in places))
    return None if found else f"{module} is not installed"


def on_hopper() -> str | None:
    """None on a GPU of compute capability 9, else the reason."""
    if not torch.cuda.is_available():
        return "needs a CUDA GPU"
    return None if torch.cuda.get_device_capability()[0] == 9 else "needs compute capability 9.0"


def package(kernel: str, module: str) -> ModuleType:
    """The module. Raises `Unsupported` with the loader's words where it is broken; a kernel of ours needs it."""
    found = _loaded(module)
    if isinstance(found, str):
        raise Unsupported(f"torch kernel {kernel}", f"{module} does not load: {found}")
    return found


@functools.cache
def _loaded(module: str) -> ModuleType | str:
    """The module or why it does not load, asked once: a broken package takes a second each time to say so."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        return str(error)
