"""What Ray is asked for."""

from cluster.config import Replicas, Resources, TargetPool
from cluster.placement import COORDINATOR_CPUS, actor_options, rank_bundle, scaling_options, target_group_options

GPU = Resources(num_cpus=2, num_gpus=0.5, accelerator_type="L4", custom={"rack": 1}, labels={"zone": "a"})


def test_an_actor_asks_for_all_of_its_resources():
    assert actor_options(GPU) == {
        "num_cpus": 2,
        "num_gpus": 0.5,
        "accelerator_type": "L4",
        "resources": {"rack": 1},
        "label_selector": {"zone": "a"},
    }
    assert actor_options(Resources()) == {"num_cpus": 1, "num_gpus": 0}, "nothing is asked for that was not configured"


def test_a_bundle_holds_what_its_actor_asks_for():
    """A rank whose options exceed its bundle is never scheduled, and the replica hangs at start."""
    assert rank_bundle(GPU) == {"CPU": 2, "GPU": 0.5, "rack": 1, "accelerator_type:L4": 0.001}
    assert rank_bundle(Resources(num_cpus=1)) == {"CPU": 1}, "Ray refuses amounts of zero"


def test_a_target_replica_is_one_group_on_one_node_with_room_for_its_coordinator():
    options = target_group_options(TargetPool(tensor_parallel=3, resources_per_rank=GPU))
    first, *others = options["placement_group_bundles"]
    assert options["placement_group_strategy"] == "STRICT_PACK"
    assert first["CPU"] == 2 + options["ray_actor_options"]["num_cpus"] == 2 + COORDINATOR_CPUS
    assert others == [rank_bundle(GPU)] * 2
    assert options["placement_group_bundle_label_selector"] == [{"zone": "a"}]
    assert "placement_group_bundle_label_selector" not in target_group_options(TargetPool())


def test_ranks_without_cpus_still_leave_room_for_the_coordinator():
    options = target_group_options(TargetPool(resources_per_rank=Resources(num_cpus=0, num_gpus=1)))
    assert options["placement_group_bundles"] == [{"GPU": 1, "CPU": COORDINATOR_CPUS}]


def test_equal_bounds_fix_a_pool_and_others_scale_it():
    assert scaling_options(Replicas(min=2, max=2)) == {"num_replicas": 2}
    scaled = scaling_options(Replicas(min=1, max=4, sessions_per_replica=6))["autoscaling_config"]
    assert (scaled["min_replicas"], scaled["max_replicas"]) == (1, 4)
    assert scaled["policy"]["policy_kwargs"] == {"sessions_per_replica": 6}
