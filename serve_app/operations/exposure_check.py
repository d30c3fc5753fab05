"""Whether an endpoint that others can reach has a key before it."""

import ipaddress

from cluster.config import OperatorsConfig, ServerConfig, SlipstreamConfig
from cluster.errors import ConfigError

LOOPBACK = "127.0.0.1"


def check_keys(server: ServerConfig) -> None:
    """Raises ConfigError for an address that others can reach, where anybody would be served unsaid."""
    for name, host in (("server.host", server.host), ("server.operators.host", server.operators.host)):
        if not is_loopback(host) and not is_guarded(server):
            raise ConfigError(f"{name} is {host}, which others can reach, and {missing_keys()}")


def for_this_machine(config: SlipstreamConfig) -> SlipstreamConfig:
    """The same, but on loopback and without keys: for a server that is started to be measured."""
    alone = {"host": LOOPBACK, "keys": {}, "operators": OperatorsConfig()}
    return config.model_copy(update={"server": config.server.model_copy(update=alone)})


def is_guarded(server: ServerConfig) -> bool:
    """Whether clients need a key, or somebody has said that they need none."""
    return bool(server.keys) or server.insecure


def missing_keys() -> str:
    """What is wrong where it is not, as the end of a sentence."""
    return (
        "server.keys is empty: anybody would be served; set keys (`slipstream key` makes one), or say server.insecure:"
        " true"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
