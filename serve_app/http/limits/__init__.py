"""What a request may take of the server: memory and time."""
