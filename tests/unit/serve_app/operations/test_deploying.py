"""What Serve is given for a config."""

from cluster.config import validated
from serve_app.operations.deploying import application_schema


def test_the_policy_sees_both_pools() -> None:
    config = validated(
        {
            "model": {"target": "owner/target"},
            "target": {"replicas": {"max": 3, "first_token_s": 1.5}},
            "draft": {"method": "suffix", "replicas": {"min": 0}, "resources": {"cpu_affinity": [1]}},
        }
    )
    schema = application_schema(config, "ours", "/ours")
    assert [one.name for one in schema.deployments] == ["Target", "Drafter", "Router"]
    assert schema.autoscaling_policy == {"policy_function": "cluster.autoscaling:PoolsPolicy"}
    assert (schema.name, schema.route_prefix, schema.import_path) == ("ours", "/ours", "serve_app.app:build")
