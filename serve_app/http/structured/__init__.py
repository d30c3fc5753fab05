"""Structured output: the grammar that a request's answer is to keep to, and whether it can be."""
