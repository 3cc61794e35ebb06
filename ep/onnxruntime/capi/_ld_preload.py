"""Which shared libraries are loaded before the others? None: the array libraries find their own."""
