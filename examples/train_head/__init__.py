"""Trains a draft head for your own target: `answers` lets the target write data, `states` stores its states, and
`train` trains a head on them. `evaluate` measures the result.
"""
