"""Commands that serve, and the demo."""
