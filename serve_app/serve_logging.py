"""Our loggers under Ray Serve's: its handlers, level and format, and its context of a replica and a request.

With `server.log_format: json`, each of a record's extras is a field of its own.
"""

import logging
from collections.abc import Iterable

PACKAGES = ("cluster", "actors", "serve_app")
SERVE = "ray.serve"


def log_under_serve(packages: Iterable[str] = PACKAGES, parent: str = SERVE) -> None:
    """To be called in a replica, where Serve has set its logger up."""
    for package in packages:
        logging.getLogger(package).parent = logging.getLogger(parent)
