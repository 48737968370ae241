"""Double precision for the whole suite; the command line and the benchmarks run in single precision, as users do."""

from collections.abc import Iterator

import jax
import pytest
from hypothesis import settings

jax.config.update("jax_enable_x64", True)
settings.register_profile("suite", deadline=None, max_examples=8, derandomize=True)
settings.load_profile("suite")


@pytest.fixture(autouse=True, scope="module")
def forget_compiled_programs() -> Iterator[None]:
    """Every compiled program takes some hundred memory maps, of which a process has 65530 by default on Linux."""
    yield
    jax.clear_caches()


@pytest.fixture
def steps() -> dict[str, float]:
    """Step sizes that suit the quadratic problems."""
    return {"lr_upper": 0.1, "lr_lower": 0.2, "lr_adjoint": 0.2}
