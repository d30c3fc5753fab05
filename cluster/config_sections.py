"""Sections of the configuration, assembled by `cluster.config`.

* `draft.METHOD`: options of each drafting method; `METHOD_SECTIONS` lists the sections used by each method.
* `draft.states`: transport of the target's hidden states to drafters.
* `trust`: authentication between processes of a deployment.
* `server.keys`: digests of client API keys.
* `tracing`: OpenTelemetry spans.
* `target.vllm`: vLLM arguments to reject, with reasons. vLLM itself checks the others at startup, so it need not be
  installed here.
* `kubernetes`: settings for `slipstream k8s render`.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from cluster.errors import ModelError
from protos.messages import StatesNeeded

Positive = Annotated[int, Field(gt=0)]


class Section(BaseModel):
    """Base class of configuration sections: immutable, and strict about unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _check_rising(ids: Sequence[int], name: str) -> None:
    """Raises ValueError unless `ids` is a non-empty, strictly increasing sequence of non-negative numbers."""
    if not ids or ids[0] < 0 or list(ids) != sorted(set(ids)):
        raise ValueError(f"{name} is {list(ids)}, expected a non-empty, strictly increasing list of ids from 0")


Quantization = Literal["none", "int8", "fp8", "int4"]


class DraftModelOptions(Section):
    """Options of methods that run a draft model."""

    quantization: Quantization = Field(
        "none",
        description="quantization of matrix products; int8: CPUs, twice as fast; fp8, int4: GPUs",
    )
    min_confidence: float = Field(
        0.0,
        ge=0,
        le=1,
        description="minimum estimated acceptance to extend an awaited block; ignored with rejection sampling",
    )
    draft_probs_top_k: int = Field(64, ge=1, le=1024, description="probabilities per token for rejection sampling")


class NgramOptions(Section):
    """Options of methods that search the text for matching n-grams: ngram and hybrid."""

    max_ngram: Positive = Field(4, description="longest suffix to match, in tokens")
    min_ngram: Positive = Field(2, description="shortest suffix to match, in tokens")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_ngram < self.min_ngram:
            raise ValueError(f"max_ngram is {self.max_ngram}, expected at least min_ngram ({self.min_ngram})")
        return self


class LayerSkipOptions(Section):
    """Options of layer_skip, which drafts with a subset of the target's layers."""

    layers: Positive | tuple[int, ...] = Field(
        4, description="number of leading layers, or increasing layer ids from 0"
    )

    @model_validator(mode="after")
    def _rising(self) -> Self:
        if not isinstance(self.layers, int):
            _check_rising(self.layers, "layers")
        return self

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of the layers used for drafting, from 0."""
        return tuple(range(self.layers)) if isinstance(self.layers, int) else self.layers


class SuffixOptions(NgramOptions):
    """Options of suffix, which searches the text and finished answers for matching suffixes."""

    max_ngram: Positive = Field(16, description="longest suffix to match, in tokens")
    remembered_tokens: int = Field(
        1 << 17,
        ge=0,
        description="searched tokens of recent answers, about 200 bytes each; 0: only the session's text",
    )


class HybridOptions(Section):
    """Options of hybrid; its model-based method has its own section."""

    then: Literal["draft_model", "medusa", "mlp_speculator", "dflash", "eagle", "mtp"] = Field(
        "draft_model",
        description="method for positions without a good match",
    )


class HeadOptions(Section):
    """Options of methods with a draft head, which reads the target's hidden states."""

    draft_probs_top_k: int = Field(64, ge=1, le=1024, description="probabilities per token for rejection sampling")
    quantization: Quantization = Field(
        "none",
        description="quantization of matrix products; int8: CPUs; fp8, int4: GPUs",
    )


class EagleOptions(HeadOptions):
    """Options of eagle.

    The options defined here override the published head's configuration.
    """

    states: tuple[int, ...] | None = Field(
        None,
        description="hidden states that EAGLE-3 concatenates; state k follows k layers; default: from the head",
    )
    layer_ids: Literal["state", "output"] | None = Field(
        None,
        description="meaning of layer id k in the head's configuration: state k, or the output of layer k (state k + "
        "1); default: from the head",
    )
    output_norm: Literal["nothing", "logits", "both"] | None = Field(
        None,
        description="use of the final norm: nothing, the logits, or the logits and recurrent states; overrides "
        "norm_output; default: from the head",
    )
    max_positions: Positive | None = Field(
        None,
        description="maximum position of the head; default: from the head, often too low",
    )

    @field_validator("states")
    @classmethod
    def _rising(cls, states: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if states is not None:
            _check_rising(states, "states")
        return states


class StatesOptions(Section):
    """Transport of the target's hidden states to drafters."""

    project: Literal["auto", "target", "drafter"] = Field(
        "auto",
        description="where to run the input projection of EAGLE-3 or DFlash; auto: on the target if that reduces the "
        "states",
    )
    dtype: Literal["bfloat16", "float8"] = Field(
        "bfloat16",
        description="encoding of states; float8 halves their size",
    )
    keep: bool = Field(
        True,
        description="keep states next to the KV cache; otherwise, the target recomputes them for new drafters and "
        "prefix hits",
    )
    window: Positive = Field(
        512,
        description="tokens to recompute without keep",
    )
    kept_tokens: Positive | None = Field(
        None,
        description="maximum tokens with kept states per drafter; default: max_sessions * max_context if they fit",
    )

    def projects_at_target(self, needed: StatesNeeded) -> bool:
        """Returns True if the target runs the method's input projection.

        Raises ModelError if `project` is `target` and the head has no projection.
        """
        narrowed = needed.projected_width
        if self.project == "target" and narrowed is None:
            raise ModelError(
                "draft.states.project is target, but the head in draft.model has no separate input projection; set it"
                " to auto or drafter"
            )
        if self.project == "auto":
            return narrowed is not None and narrowed < needed.width
        return self.project == "target"


HEADS = frozenset({"medusa", "mlp_speculator", "dflash", "eagle"})
"""Methods whose checkpoint is a draft head, without a tokenizer."""

STATE_READERS = HEADS | {"mtp"}
"""Methods that read the target's hidden states; MTP modules are part of the target's checkpoint."""

METHOD_SECTIONS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "draft_model": frozenset({"draft_model"}),
        "ngram": frozenset({"ngram"}),
        "hybrid": frozenset({"hybrid", "ngram"}),
        "layer_skip": frozenset({"draft_model", "layer_skip"}),
        "suffix": frozenset({"suffix"}),
        **{method: frozenset({method}) for method in STATE_READERS},
    }
)
"""Sections used by each method; hybrid also uses the sections of its model-based method."""

PROJECTING_HEADS = frozenset({"dflash", "eagle"})
"""Heads that may have a separate input projection, depending on the checkpoint."""

MODEL_METHODS = frozenset({"draft_model"}) | HEADS
"""Methods with their own checkpoint; hybrid follows its model-based method."""

SHARED_METHODS = frozenset({"draft_model", "ngram", "suffix"})
"""Methods that can draft for several targets; hybrid follows its model-based method."""

LEARNING_METHODS = frozenset({"draft_model", "eagle", "medusa", "mlp_speculator"})
"""Methods with weights that `draft.learning` can train; hybrid follows its model-based method."""


class TrustConfig(Section):
    """Authentication between routers, drafters and targets over gRPC.

    Without `certificates` or `token_file`, servers listen only on loopback.
    """

    certificates: str | None = Field(
        None,
        description="folder of tls.crt, tls.key and ca.crt; {role} stands for router, drafter or target",
    )
    token_file: str | None = Field(
        None,
        description="file of tokens, one per line: sends the first, accepts all, without encryption",
    )
    insecure: bool = Field(
        False,
        description="listen on non-loopback addresses without authentication",
    )
    reflection: bool = Field(False, description="enable gRPC reflection")
    max_streams_per_host: Positive = Field(256, description="maximum streams per server and remote host")

    @model_validator(mode="after")
    def _at_most_one(self) -> Self:
        given = {"certificates": self.certificates, "token_file": self.token_file, "insecure": self.insecure or None}
        named = [key for key, value in given.items() if value is not None]
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)} are set, expected at most one of {', '.join(given)}")
        return self

    @property
    def is_off(self) -> bool:
        """True if no authentication is configured and `insecure` is not set."""
        return self.certificates is None and self.token_file is None and not self.insecure


class ApiKey(Section):
    """A client's API key, stored as a digest.

    `slipstream key` generates a key and its digest.
    """

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="hexadecimal digest of the key")
    max_sessions: Positive | None = Field(None, description="maximum active sessions per router; otherwise 429")
    max_tokens: Positive | None = Field(
        None,
        description="upper limit and default of max_tokens; otherwise 400",
    )
    cache_salt: str | None = Field(
        None,
        description="keys with the same salt share cached prefixes",
    )
    learn: bool = Field(True, description="false: never learn from this key's requests")


class TracingConfig(Section):
    """OpenTelemetry traces of requests through HTTP, router, drafter and target; disabled without `endpoint`.

    Requires the extra `tracing`: `pip install '.[tracing]'`.
    """

    endpoint: Annotated[str, Field(pattern=r"^https?://[^\s/]+")] | None = Field(
        None,
        description="OTLP/HTTP endpoint, for example http://collector:4318/v1/traces",
    )
    sample: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of requests to trace; a traceparent header overrides it",
    )
    slow_s: float = Field(
        1.0,
        ge=0,
        description="minimum session duration to record every round",
    )

    @property
    def is_on(self) -> bool:
        return self.endpoint is not None


REFUSED_VLLM_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "async_scheduling": "it schedules steps before the tokens that blocks must match are known",
        "speculative_config": "drafters provide the drafts; set speculation.draft_tokens for their length",
        "pipeline_parallel_size": "several steps in flight are untested",
        "data_parallel_size": "a replica is one engine; set target.replicas instead",
        "decode_context_parallel_size": "it is untested",
        "enable_batch_sharded_sampling": "every rank must decide every session",
        "kv_transfer_config": "externally stored pages are untested",
        "kv_offloading_size": "externally stored pages are untested",
        "kv_offloading_backend": "externally stored pages are untested",
        "scheduler_cls": "Slipstream needs its own scheduler to accept blocks",
        "worker_cls": "Slipstream extends vLLM's workers with coupled sampling",
        "worker_extension_cls": "Slipstream's own extension draws tokens with shared noise",
        "logits_processors": "Slipstream's own processor draws tokens with shared noise",
        "skip_tokenizer_init": "only the router tokenizes text",
        "runner": "targets only generate text",
        "max_loras": "a step may need all of target.adapters",
    }
)
"""Rejected vLLM arguments, with the reason."""

RENAMED_VLLM_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "model": "model.target",
        "tokenizer": "model.target",
        "served_model_name": "model.served_name",
        "dtype": "model.dtype",
        "max_model_len": "model.max_context",
        "tensor_parallel_size": "target.tensor_parallel",
        "max_num_seqs": "target.max_sessions",
        "max_num_batched_tokens": "target.max_step_tokens",
        "kv_cache_memory_bytes": "target.cache_per_rank.gib",
    }
)
"""vLLM arguments that are set through another configuration key."""


def faults_of(arguments: Iterable[str]) -> list[str]:
    """Returns an error message for each rejected argument."""
    faults = []
    for name in arguments:
        if name in REFUSED_VLLM_OPTIONS:
            faults.append(f"vllm.{name} cannot be set: {REFUSED_VLLM_OPTIONS[name]}; remove it")
        elif name in RENAMED_VLLM_OPTIONS:
            faults.append(f"vllm.{name} cannot be set; set {RENAMED_VLLM_OPTIONS[name]} instead")
    return faults


Quantity = Annotated[str, Field(pattern=r"^\d+(\.\d+)?(m|Ki|Mi|Gi|Ti)?$")]
Component = Literal["certificates", "monitoring", "disruption-budget", "gcs-fault-tolerance"]


class PodOptions(Section):
    """Options of one type of pod."""

    cpu: Quantity = Field("2", description="CPU request, without a limit")
    memory: Quantity = Field("8Gi", description="memory request and limit")
    shared_memory: Quantity = Field("1Gi", description="size of /dev/shm")
    node_selector: dict[str, str] = Field(default_factory=dict, description="required labels of the Kubernetes node")
    tolerations: tuple[str, ...] = Field((), description="keys of tolerated taints")


class PoolPodOptions(PodOptions):
    """Options of a pool's pods. The number of GPUs follows from the resources of the pool's replicas."""

    replicas: int = Field(1, gt=0, description="pool replicas per pod")
    idle_s: int = Field(120, gt=0, description="idle time before a pod is removed, in seconds")


class VolumeOptions(Section):
    """The volume for model weights. A job fills it; all other pods mount it read-only."""

    size: Quantity = Field("100Gi", description="storage request")
    access: Literal["ReadWriteMany", "ReadWriteOnce"] = Field(
        "ReadWriteMany", description="access mode; ReadWriteOnce limits the deployment to one node"
    )
    storage_class: str | None = Field(None, description="storage class; default: the cluster's default class")


class KubernetesOptions(Section):
    """Settings used only by `slipstream k8s render`."""

    image: str | None = Field(None, description="container image of all pods")
    image_pull_secrets: tuple[str, ...] = Field((), description="secrets with access to the image's private registry")
    components: tuple[Component, ...] = Field((), description="components to deploy")
    volume: VolumeOptions = VolumeOptions()
    head: PodOptions = PodOptions()
    router: PodOptions = PodOptions()
    target: PoolPodOptions = PoolPodOptions()
    draft: PoolPodOptions = PoolPodOptions()
    pools: dict[str, PoolPodOptions] = Field(
        default_factory=dict, description="pods of one of several pools, such as target-NAME or draft-NAME"
    )
