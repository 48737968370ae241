"""``python -m fedbilevel``."""

from fedbilevel.cli.main import main

main()
