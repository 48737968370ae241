"""Finding wrong labels in people's own tables and pictures: what ``fedbilevel clean`` and ``fb.clean`` do.

Imports ``runs`` and the folders above it; ``report`` and ``cli`` import it.
"""
