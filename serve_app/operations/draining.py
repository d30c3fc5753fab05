"""How long Ray must let replicas finish on a node that is asked to end. Pure."""

import math

from cluster.config import SlipstreamConfig

RAY_DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"  # seconds; `ray start --block` reads it, and heeds it on SIGTERM
RAY_DRAINS_S = 30.0  # unless it is told
SERVE_NOTICES_S = 15  # until Serve has learnt that a node drains and has stopped what ran there
REPLICA_ENDS_S = 10  # from the end of a replica's own drain to its end, before Serve kills it


def drain_s(config: SlipstreamConfig) -> int:
    """How long Ray lets replicas finish on a node that ends, if they are to have all that the configuration says."""
    return math.ceil(max(config.server.drain_s, config.target.drain_s)) + REPLICA_ENDS_S + SERVE_NOTICES_S
