"""Engines: what executes an algorithm. All of them execute the same files."""
