"""`slipstream bench`: the same prompts with and without speculation."""
