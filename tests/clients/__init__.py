"""Third-party clients, each in its own environment, against a server with a rule-based model."""
