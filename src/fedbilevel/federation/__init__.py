"""The real federation: separate parties, mutual TLS, drop-outs and restarts, on NVIDIA FLARE.

Who does what: ``project.py`` makes certificates and start-up kits; ``coordinator.py`` is the process of the server,
which keeps FLARE alive and (re)submits runs; ``server.py`` is the server's side of a run, ``site.py`` and ``worker.py``
a site's; ``schema.py`` reads a site's own rows; ``demo.py`` does all of it on one machine.

May import everything but cli; only cli imports it.
"""
