"""The engine: plans each request once, and runs it on the chosen backend, eagerly or in a traced program."""
