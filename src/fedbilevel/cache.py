"""The cache folder, for what can be downloaded or made again: data sets, compiled programs.

At the top level because data and storage both need it, and neither imports the other.
"""

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """`FEDBILEVEL_CACHE`, or `fedbilevel` in the user's cache folder of this platform."""
    if chosen := os.environ.get("FEDBILEVEL_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "fedbilevel"
