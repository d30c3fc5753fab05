"""The language of the system: messages, their wire form, and the prefix hash that addresses blocks.

Knows nothing of models, Ray or HTTP.
"""
