"""The request: the description of one round that a backend runs, its validation, and its random numbers."""
