"""Trains a draft head for your own target.

`answers` generates data with the target, `states` stores its hidden states, `train` trains a head on them, and
`evaluate` measures the result.
"""
