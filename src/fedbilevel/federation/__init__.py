"""The real federation: separate parties, mutual TLS, drop-outs and restarts, on NVIDIA FLARE.

Who does what: ``project.py`` makes certificates and start-up kits; ``coordinator.py`` is the process of the server,
which keeps FLARE alive and (re)submits runs; ``server.py`` is the server's side of a run, ``site.py`` and ``worker.py``
a site's; ``schema.py`` and ``own.py`` turn a site's own rows into a task; ``demo.py`` does all of it on one machine.
"""
