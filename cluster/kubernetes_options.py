"""The part of the configuration that only Kubernetes needs: image, pods and volume, for `slipstream k8s render`."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Quantity = Annotated[str, Field(pattern=r"^\d+(\.\d+)?(m|Ki|Mi|Gi|Ti)?$")]
Component = Literal["certificates", "monitoring", "disruption-budget", "gcs-fault-tolerance"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PodOptions(_Section):
    """Options of one kind of pod."""

    cpu: Quantity = Field("2", description="CPUs requested; there is no limit")
    memory: Quantity = Field("8Gi", description="memory requested, which is the limit too")
    shared_memory: Quantity = Field("1Gi", description="most of it in /dev/shm: NCCL's, and Ray's object store")
    node_selector: dict[str, str] = Field(default_factory=dict, description="labels of the Kubernetes nodes to run on")
    tolerations: tuple[str, ...] = Field((), description="keys of taints that the nodes may have, whatever their value")


class PoolPodOptions(PodOptions):
    """Options of a pool's pods. Their GPUs are not listed here: they follow from what the pool's replicas reserve."""

    replicas: int = Field(1, gt=0, description="of the pool that a pod has room for")
    idle_s: int = Field(120, gt=0, description="without replicas, after which the autoscaler removes the pod")


class VolumeOptions(_Section):
    """The volume with the weights. A job fills it; all other pods mount it read-only."""

    size: Quantity = Field("100Gi", description="storage requested")
    access: Literal["ReadWriteMany", "ReadWriteOnce"] = Field(
        "ReadWriteMany", description="ReadWriteOnce is for clusters of one node"
    )
    storage_class: str | None = Field(None, description="default: the cluster's own")


class KubernetesOptions(_Section):
    """Additional settings for `slipstream k8s render`, which nothing else reads."""

    image: str | None = Field(None, description="container image of all pods, built from k8s/images/Dockerfile")
    components: tuple[Component, ...] = Field((), description="folders of k8s/components to deploy too")
    volume: VolumeOptions = VolumeOptions()
    head: PodOptions = PodOptions()
    router: PodOptions = PodOptions()
    target: PoolPodOptions = PoolPodOptions()
    draft: PoolPodOptions = PoolPodOptions()
