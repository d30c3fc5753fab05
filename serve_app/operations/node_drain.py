"""Computes Ray's drain time for a stopping node. Imports no Ray, so that commands can use it without delay."""

import math

from cluster.config import SlipstreamConfig

RAY_DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"  # seconds; applied by `ray start --block` on SIGTERM
RAY_DRAIN_DEFAULT_S = 30.0  # Ray's default
SERVE_NOTICE_S = 15  # seconds until Serve notices a draining node and stops its replicas
REPLICA_SHUTDOWN_S = 10  # seconds from the end of a replica's drain until Serve kills it


def drain_s(config: SlipstreamConfig) -> int:
    """Returns Ray's drain time for a stopping node, in seconds; at least the configured drain times."""
    longest = max(config.server.drain_s, *(one.config.target.drain_s for one in config.served))
    return math.ceil(longest) + REPLICA_SHUTDOWN_S + SERVE_NOTICE_S
