"""FLARE's server as a federation starts it: ``python -m fedbilevel.federation.server_train ARGUMENTS...``.

Its port stays open to new parties, whatever connects to it, and it refuses certificates that were revoked.
"""

import os
import runpy
from pathlib import Path

from fedbilevel.federation import revocation
from fedbilevel.federation.wire import listener
from fedbilevel.federation.wire.sites import FEDERATION_FOLDER

if __name__ == "__main__":
    revocation.install(Path(os.environ[FEDERATION_FOLDER]) / "server")
    listener.install()
    runpy.run_module("nvflare.private.fed.app.server.server_train", run_name="__main__", alter_sys=True)
