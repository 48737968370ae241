"""Pictures of histories with matplotlib: no files, no folders.

Imports core; runs and report import it.
"""
