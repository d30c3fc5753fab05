"""Names of a mirrored metric family at Ray's metrics port."""

from collections.abc import Iterable, Mapping

from prometheus_client.metrics_core import Metric

from serve_app.publishing.ray_mirror import CREATED, ray_name


def exported(families: Iterable[Metric]) -> Mapping[str, set[str]]:
    """Returns the labels of each sample of the mirrored families, by its name at Ray's port.

    The labels include those that Serve adds.
    """
    found: dict[str, set[str]] = {}
    for family in families:
        for sample in family.samples:
            if not sample.name.endswith(CREATED):
                found.setdefault(f"ray_{ray_name(sample.name)}", set()).update(sample.labels)
    return found
