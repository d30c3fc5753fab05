"""Multi-token prediction modules, which come with a target in its own checkpoint."""
