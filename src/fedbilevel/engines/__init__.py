"""What executes a server program: the compiled simulator, and messages between a server and its clients.

Imports core and storage, and no algorithm; diagnostics, runs and federation import it.
"""
