"""What a person looks at: terminal tables, figures, the HTML page, the catalogue of algorithms.

Imports storage and runs; reproduction, federation and cli import it.
"""
