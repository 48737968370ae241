"""``python -m fedbilevel``."""

from fedbilevel.cli import main

main()
