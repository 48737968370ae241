"""FLARE's server as a federation starts it: ``python -m fedbilevel.federation.server_train ARGUMENTS...``.

Its port stays open to new parties, whatever connects to it.
"""

import runpy

from fedbilevel.federation.wire import listener

if __name__ == "__main__":
    listener.install()
    runpy.run_module("nvflare.private.fed.app.server.server_train", run_name="__main__", alter_sys=True)
