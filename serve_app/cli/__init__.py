"""Commands that serve a configuration, and the demos."""
