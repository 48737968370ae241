"""The examples in docstrings, of the installed package."""

import doctest
import importlib
import pkgutil
from importlib.util import find_spec

import jax
import pytest

import fedbilevel

MODULES = [m.name for m in pkgutil.walk_packages(fedbilevel.__path__, "fedbilevel.") if not m.name.endswith("__main__")]
if find_spec("torchax") is None:  # an extra
    MODULES = [name for name in MODULES if not name.startswith("fedbilevel.pytorch.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module = importlib.import_module(name)
    with jax.enable_x64(False):  # as readers run them
        assert doctest.testmod(module).failed == 0


def test_there_are_examples() -> None:
    found = [
        test
        for name in MODULES
        for test in doctest.DocTestFinder().find(importlib.import_module(name))
        if test.examples
    ]
    assert len(found) >= 10
