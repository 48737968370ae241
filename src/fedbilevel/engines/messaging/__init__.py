"""Messages between a server and its clients: what they say, who sends them, who answers.

Imports the rest of engines; runs and federation import it.
"""
