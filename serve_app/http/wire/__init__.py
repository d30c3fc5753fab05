"""What goes over the wire in HTTP: schemas of requests and of answers."""
