"""Drafting methods, each a module: how a drafter finds candidate tokens."""
