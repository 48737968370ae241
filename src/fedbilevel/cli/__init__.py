"""The command line: it reads arguments and shows results, and has no logic of its own.

Imports everything; nothing imports it.
"""

from fedbilevel.cli.commands import app, main

__all__ = ["app", "main"]
