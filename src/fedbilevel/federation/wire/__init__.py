"""How messages travel between a server and its sites: proofs of who speaks (``signing``), frames of NVIDIA FLARE
(``channel``), the pipe to a site's worker (``pipes``) and the port that all parties connect to (``listener``).

Only ``federation`` may import it.
"""
