"""Pictures of histories and of wrong labels with matplotlib: no files, no folders.

Imports core and engines; runs, cleaning, report and reproduction import it.
"""
