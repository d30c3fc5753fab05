"""`slipstream doctor`: what a Ray cluster lacks for a configuration, and what to do about it."""
