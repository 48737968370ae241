"""A federation of real parties on NVIDIA FLARE: mutual TLS, drop-outs, restarts.

``project.py`` makes certificates and start-up kits. ``coordinator.py`` is the server's process: it keeps FLARE alive
and (re)submits runs. ``server.py`` is the server's side of a run, ``site.py`` and ``worker.py`` are a site's.
``schema.py`` reads a site's own rows. ``demo.py`` runs everything on one machine.

May import everything but cli; only cli imports it.
"""
