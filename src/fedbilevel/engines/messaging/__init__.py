"""Messages between a server and its clients: their contents, the server's end, the client's end.

Imports the rest of engines; runs and federation import it.
"""
