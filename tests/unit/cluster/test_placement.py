"""Tests resource requests to Ray."""

import subprocess
import sys

import pytest
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from cluster.autoscaling import as_numbers
from cluster.config import (
    DraftPool,
    DraftReplicas,
    Resources,
    ServedModel,
    SlipstreamConfig,
    TargetPool,
    TargetReplicas,
)
from cluster.placement import (
    ALONE_POLICY,
    AUTOSCALING_POLICY,
    actor_options,
    autoscaling_config,
    rank_bundle,
    scaling_settings,
    target_group_options,
)


def served(**pools: TargetPool | DraftPool) -> ServedModel:
    (one,) = SlipstreamConfig(**{"model": {"target": "t"}, "draft": {"method": "suffix"}} | pools).served
    return one


GPU = Resources(num_cpus=2, num_gpus=0.75, accelerator_type="L4", custom={"rack": 1}, labels={"zone": "a"})


def test_an_actor_requests_all_of_its_resources():
    assert actor_options(GPU) == {
        "num_cpus": 2,
        "num_gpus": 0.75,
        "accelerator_type": "L4",
        "resources": {"rack": 1},
        "label_selector": {"zone": "a"},
    }
    assert actor_options(Resources()) == {"num_cpus": 1, "num_gpus": 0}, "only configured resources are requested"


def test_a_bundle_holds_the_resources_of_its_actor():
    """Ray never schedules a rank whose options exceed its bundle, and the replica would hang at start."""
    assert rank_bundle(GPU) == {"CPU": 2, "GPU": 0.75, "rack": 1, "accelerator_type:L4": 0.001}
    assert rank_bundle(Resources(num_cpus=1)) == {"CPU": 1}, "Ray refuses amounts of zero"


def test_a_target_replica_is_one_group_on_one_node_that_includes_its_coordinator():
    options = target_group_options(TargetPool(tensor_parallel=3, resources_per_rank=GPU))
    first, *others = options["placement_group_bundles"]
    assert options["placement_group_strategy"] == "STRICT_PACK"
    assert first["CPU"] == 2 + options["ray_actor_options"]["num_cpus"] > 2
    assert others == [rank_bundle(GPU)] * 2
    assert options["placement_group_bundle_label_selector"] == [{"zone": "a"}]
    assert "placement_group_bundle_label_selector" not in target_group_options(TargetPool())


def test_a_group_whose_ranks_have_no_cpus_includes_the_coordinator():
    options = target_group_options(TargetPool(resources_per_rank=Resources(num_cpus=0, num_gpus=1)))
    assert options["placement_group_bundles"] == [{"GPU": 1, "CPU": options["ray_actor_options"]["num_cpus"]}]


def test_bounds_and_settings_reach_the_policy():
    pool = DraftPool(method="ngram", max_sessions=12, replicas=DraftReplicas(min=0, max=4, down_delay_s=60))
    scaled = autoscaling_config(pool.replicas)
    assert (scaled["min_replicas"], scaled["max_replicas"]) == (0, 4)
    assert (scaled["upscale_delay_s"], scaled["downscale_delay_s"]) == (0, 0), "delays are the policy's"
    assert scaling_settings(served(draft=pool))["Drafter"] == {
        "sessions_per_replica": 6,
        "per_target": None,
        "up_delay_s": 10,
        "down_delay_s": 60,
    }


def test_a_pool_of_fixed_size_reports_too():
    """The other pool may depend on its reports for scaling."""
    scaled = autoscaling_config(TargetReplicas(min=2, max=2))
    assert (scaled["min_replicas"], scaled["max_replicas"]) == (2, 2)


@pytest.mark.parametrize(("asked", "aim"), [(None, 8), (6.0, 6)], ids=["half of max_sessions", "configured"])
def test_desired_sessions_per_target_replica(asked: float | None, aim: float):
    pool = TargetPool(max_sessions=16, replicas=TargetReplicas(sessions_per_replica=asked))
    settings = scaling_settings(served(target=pool))["Target"]
    assert (settings["sessions_per_replica"], settings["max_sessions"]) == (aim, 16)


@pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field")
def test_serve_receives_the_policies_by_value():
    """Serve's controller may lack this package, so unpickling must not import it."""
    config = AutoscalingConfig(**autoscaling_config(TargetReplicas()), policy=ALONE_POLICY)
    alone = config.policy.get_serialized_policy_def()
    both = AutoscalingPolicy(**AUTOSCALING_POLICY).get_serialized_policy_def()
    settings = as_numbers(scaling_settings(served()))
    code = f"""if True:
        import pickle, sys
        alone, both = pickle.loads({alone!r}), pickle.loads({both!r})
        from types import SimpleNamespace as Some
        values = dict(running=15, queued=0, drafted=0, undrafted=0, waiting=0, cache=0, unread=0, first_token_s=0)
        values = dict(values, backlog_s=0, gain=1, **{settings!r})
        seen = Some(aggregated_metrics={{name: {{"a": value}} for name, value in values.items()}}, policy_state={{}},
                    capacity_adjusted_min_replicas=1, capacity_adjusted_max_replicas=4, target_num_replicas=1,
                    deployment_name="Target")
        for seen.current_time in (0, 20):
            size, seen.policy_state = alone()(seen)
        assert both()({{"t": seen}})[0] == {{"t": size}}
        assert not [name for name in sys.modules if name.startswith("cluster")]
        print(size)
    """
    done = subprocess.run(
        [sys.executable, "-"], cwd="/", env={}, input=code, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("2\n", "")
