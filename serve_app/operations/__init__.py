"""Starts, updates, checks and inspects deployments, for the command line.

`local` starts a Ray cluster and serves a configuration on it; `rollout` deploys to a running cluster. Both check models
(`preflight`) and resources (`checks`) first, and deploy through `deploying`, like `serve deploy`. `ray_cluster` reads
measured costs and recordings from a cluster.
"""
