"""Errors in a user's torch code, as one sentence that names the module, the line and what to do."""

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import jax
import torch

from fedbilevel.errors import FedbilevelError
from fedbilevel.pytorch.compatibility import torchax

_LIBRARIES = [Path(str(library.__file__)).parent for library in (torch, torchax, jax)]
LIBRARIES = (*_LIBRARIES, Path(__file__).parents[1])
LOOKS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
"""Python wants to know a value that is not known before the compiled program runs."""


@contextmanager
def explained(name: str, modules: Iterable[tuple[str, torch.nn.Module]]) -> Iterator[None]:
    """Tell errors of the code inside as one sentence.

    Args:
        name: "upper" or "lower".
        modules: all modules that take part, by their names.
    """
    try:
        yield
    except Exception as error:
        place = _place(error, {id(module): path for path, module in modules})
        if isinstance(error, torchax.tensor.OperatorNotFound):
            operation = str(error).removeprefix("Operator with name ").partition(" ")[0].replace("::", ".")
            raise FedbilevelError(
                f"{name}(x, y, batch): torchax has no operation {operation}{place}: "
                "write this part with other operations of torch."
            ) from error
        if isinstance(error, LOOKS):
            raise FedbilevelError(
                f"{name}(x, y, batch) is compiled, so that Python cannot look at the values of its tensors{place}: "
                "use torch.where instead of if, a mask instead of a selection, and no item() or numpy()."
            ) from error
        if isinstance(error, FedbilevelError):
            raise FedbilevelError(f"{name}(x, y, batch): {str(error).removesuffix('.')}{place}.") from error
        lines = str(error).strip().splitlines()
        reason = type(error).__name__ + (f": {lines[0].removesuffix('.')}" if lines else "")
        raise FedbilevelError(f"{name}(x, y, batch) fails{place}: {reason}.") from error


def _place(error: Exception, modules: dict[int, str]) -> str:
    """The innermost module, and the innermost line of the user's own code."""
    inner, line = "", ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        owner = modules.get(id(frame.f_locals.get("self")))
        if owner is not None:
            inner = f"{owner} ({type(frame.f_locals['self']).__name__})"
        if _is_users(frame):
            file = Path(frame.f_code.co_filename)
            code = traceback.FrameSummary(str(file), number, "").line
            line = f"{file.name}, line {number}" + (f": {code}" if code else "")
    return (f" in {inner}" if inner else "") + (f" ({line})" if line else "")


def _is_users(frame: FrameType) -> bool:
    file = Path(frame.f_code.co_filename)
    return not any(file.is_relative_to(library) for library in LIBRARIES) and "contextlib" not in file.name
