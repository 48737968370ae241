"""Pictures of histories with matplotlib: no files, no folders.

Imports core and engines; runs, report and reproduction import it.
"""
