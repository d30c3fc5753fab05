"""How what each process measures is published: through Ray's metrics, and all of it together at `/metrics`."""
