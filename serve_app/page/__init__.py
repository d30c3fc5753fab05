"""The live page at `/`: shows the pools' activity, and the answer to a prompt with drafted text marked.

`routes.py` samples the replicas at most once a second, and serves the state and the files in `static`.
"""
