"""Finding wrong labels in people's own tables and pictures: what ``fedbilevel clean`` and ``fb.clean`` do.

Imports ``report`` and the folders above it; ``cli`` imports it.
"""
