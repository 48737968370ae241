"""The tests of PyTorch models skip where torch is missing."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") and find_spec("torchax") else ["test_*.py"]
