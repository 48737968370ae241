"""FLARE's server as a federation starts it: ``python -m fedbilevel.federation.server_train ARGUMENTS...``.

Its port stays open to new parties, whatever connects to it. It refuses certificates that were revoked, and requests in
somebody else's name.
"""

import os
import runpy
from pathlib import Path

from fedbilevel.federation import revocation
from fedbilevel.federation.wire import callers, listener
from fedbilevel.federation.wire.sites import FEDERATION_FOLDER

if __name__ == "__main__":
    revocation.install(Path(os.environ[FEDERATION_FOLDER]) / "server")
    listener.install()
    callers.install_at_server()
    runpy.run_module("nvflare.private.fed.app.server.server_train", run_name="__main__", alter_sys=True)
