"""Sections of the configuration that `cluster.config` assembles.

* One section of `draft` per drafting method, and the sections that each method reads (`METHOD_SECTIONS`).
* `draft.states`: how the target's hidden states reach drafters.
* `trust`: authentication between the processes of a deployment.
* `server.keys`: client API keys, by digest.
* `tracing`: OpenTelemetry spans.
* `target.vllm`: which of vLLM's arguments are refused, and why. vLLM need not be installed; it checks the other names
  itself when it starts.
* `kubernetes`: image, pods and volume for `slipstream k8s render`.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from cluster.errors import ModelError
from protos.messages import StatesNeeded

Positive = Annotated[int, Field(gt=0)]


class Section(BaseModel):
    """Base of all sections of the configuration: immutable, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _check_rising(ids: Sequence[int], name: str) -> None:
    """Raises ValueError unless `ids` are at least one non-negative number, each higher than the previous one."""
    if not ids or ids[0] < 0 or list(ids) != sorted(set(ids)):
        raise ValueError(f"{name} are {list(ids)}, expected at least one id, from 0, each higher than the last")


class DraftModelOptions(Section):
    """Options of the methods that run a draft model."""

    quantization: Literal["none", "int8"] = Field(
        "none",
        description="int8: products in 8 bits, on CPUs only; about twice as fast",
    )
    min_confidence: float = Field(
        0.0,
        ge=0,
        le=1,
        description="estimated acceptance below which an awaited block ends; ignored with rejection sampling",
    )
    draft_probs_top_k: int = Field(
        64, ge=1, le=1024, description="probabilities sent per token, for rejection sampling"
    )


class NgramOptions(Section):
    """Options of the methods that search the text for its continuation: ngram and hybrid."""

    max_ngram: Positive = Field(4, description="longest suffix to search for, in tokens")
    min_ngram: Positive = Field(2, description="shortest suffix to search for, in tokens")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_ngram < self.min_ngram:
            raise ValueError(f"max_ngram is {self.max_ngram}, expected at least min_ngram, which is {self.min_ngram}")
        return self


class LayerSkipOptions(Section):
    """Options of layer_skip, which drafts with some of the target's layers."""

    layers: Positive | tuple[int, ...] = Field(4, description="number of first layers, or rising layer ids from 0")

    @model_validator(mode="after")
    def _rising(self) -> Self:
        if not isinstance(self.layers, int):
            _check_rising(self.layers, "layers")
        return self

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of the target's layers that draft, from 0."""
        return tuple(range(self.layers)) if isinstance(self.layers, int) else self.layers


class SuffixOptions(NgramOptions):
    """Options of suffix, which searches the text and finished answers for the continuation."""

    max_ngram: Positive = Field(16, description="longest suffix to search for, in tokens")
    remembered_tokens: int = Field(
        1 << 17,
        ge=0,
        description="tokens of recent answers to search, ~200 bytes each; 0: the text itself only",
    )


class HybridOptions(Section):
    """Options of hybrid; those of its model-based method are in that method's section."""

    then: Literal["draft_model", "medusa", "mlp_speculator", "dflash", "eagle", "mtp"] = Field(
        "draft_model",
        description="method when the search finds no good match",
    )


class HeadOptions(Section):
    """Options of a method that drafts with a published head, which reads the target's hidden states."""

    draft_probs_top_k: int = Field(
        64, ge=1, le=1024, description="probabilities sent per token, for rejection sampling"
    )
    quantization: Literal["none", "int8"] = Field(
        "none",
        description="int8: products in 8 bits, on CPUs only",
    )


class EagleOptions(HeadOptions):
    """Options of eagle.

    Options that are not inherited override the published head's configuration, which applies by default.
    """

    states: tuple[int, ...] | None = Field(
        None,
        description="hidden states that EAGLE-3 concatenates: k is the residual stream after k layers; default: the"
        " head's",
    )
    layer_ids: Literal["state", "output"] | None = Field(
        None,
        description="a layer id k in the head's configuration is state k, or the output of layer k (state k + 1)."
        " The wrong one costs most of the acceptance; default: the head's",
    )
    output_norm: Literal["nothing", "logits", "both"] | None = Field(
        None,
        description="what the last norm applies to: nothing, the logits, or also the states that the head continues"
        " from. Overrides norm_output; default: the head's",
    )
    max_positions: Positive | None = Field(
        None,
        description="positions of the head; published heads often state 2048 although trained for more; default: the"
        " head's",
    )

    @field_validator("states")
    @classmethod
    def _rising(cls, states: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if states is not None:
            _check_rising(states, "states")
        return states


class StatesOptions(Section):
    """Transport of the target's hidden states to methods that read them."""

    project: Literal["auto", "target", "drafter"] = Field(
        "auto",
        description="where an EAGLE-3 or DFlash projection runs. At the target, one hidden size per token is kept"
        " and sent instead of one per layer. auto: at the target if that is narrower",
    )
    dtype: Literal["bfloat16", "float8"] = Field(
        "bfloat16",
        description="float8 halves the bytes, plus one scale per token",
    )
    keep: bool = Field(
        True,
        description="keep states beside the KV cache. Otherwise the target recomputes them for new drafters and"
        " prefix hits: one token for medusa and mlp_speculator, `window` tokens for the others",
    )
    window: Positive = Field(
        512,
        description="last tokens to recompute without keep; fewer cost less, and lose acceptance",
    )
    kept_tokens: Positive | None = Field(
        None,
        description="tokens whose states one drafter keeps; beyond, it refuses and drops sessions; default:"
        " max_sessions times max_context",
    )

    def projects_at_target(self, needed: StatesNeeded) -> bool:
        """Returns True if the target applies the method's projection.

        Raises ModelError if `project` is `target` and the head has no projection.
        """
        narrowed = needed.projected_width
        if self.project == "target" and narrowed is None:
            raise ModelError(
                "draft.states.project is target, but the head in draft.model has no input projection of the target's"
                " states alone; set it to auto or drafter"
            )
        if self.project == "auto":
            return narrowed is not None and narrowed < needed.width
        return self.project == "target"


HEADS = frozenset({"medusa", "mlp_speculator", "dflash", "eagle"})
"""Methods whose checkpoint is a head, which reads the target's hidden states and has no tokenizer."""

STATE_READERS = HEADS | {"mtp"}
"""Methods that read the target's hidden states; an MTP module is part of the target's own checkpoint."""

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
"""Sections that each method reads; hybrid also reads those of its model-based method."""

PROJECTING_HEADS = frozenset({"dflash", "eagle"})
"""Heads that may begin with a projection of the states alone; the checkpoint shows whether one does."""

MODEL_METHODS = frozenset({"draft_model"}) | HEADS
"""Methods that load a checkpoint of their own; hybrid does if its model-based method does."""

LEARNING_METHODS = frozenset({"draft_model"})
"""Methods whose weights `draft.learning` trains; hybrid's if its model-based method is one of them."""


class TrustConfig(Section):
    """Authentication of routers, drafters and targets on their gRPC streams: `certificates`, `token_file` or neither.

    With neither, servers listen on loopback only, unless `insecure` is set because the network is trusted.
    """

    certificates: str | None = Field(
        None,
        description="folder with tls.crt, tls.key and ca.crt for mutual TLS; {role} stands for router, drafter or"
        " target",
    )
    token_file: str | None = Field(
        None,
        description="shared tokens, one per line: the first is sent, all are accepted. Not encrypted",
    )
    insecure: bool = Field(
        False,
        description="allow servers beyond loopback without either; every peer is trusted",
    )
    reflection: bool = Field(False, description="enable gRPC reflection")
    max_streams_per_host: Positive = Field(256, description="streams per server from one host")

    @model_validator(mode="after")
    def _at_most_one(self) -> Self:
        given = {"certificates": self.certificates, "token_file": self.token_file, "insecure": self.insecure or None}
        named = [key for key, value in given.items() if value is not None]
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)} are given, expected at most one of {', '.join(given)}")
        return self

    @property
    def is_off(self) -> bool:
        """True if no authentication is configured and `insecure` is not set."""
        return self.certificates is None and self.token_file is None and not self.insecure


class ApiKey(Section):
    """One client's key, as its digest.

    No configuration holds the key itself; `slipstream key` makes a key and its digest.
    """

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the key, hexadecimal")
    max_sessions: Positive | None = Field(None, description="sessions in flight per router; else 429")
    max_tokens: Positive | None = Field(
        None,
        description="largest max_tokens, and its default; else 400",
    )
    cache_salt: str | None = Field(
        None,
        description="keys with one salt share cached prefixes; default: none does",
    )
    learn: bool = Field(True, description="false: requests with this key never become examples for draft.learning")


class TracingConfig(Section):
    """OpenTelemetry spans of requests, from HTTP through router, drafter and target; off without an `endpoint`.

    Needs the extra `tracing`: `pip install '.[tracing]'`.
    """

    endpoint: Annotated[str, Field(pattern=r"^https?://[^\s/]+")] | None = Field(
        None,
        description="OTLP/HTTP endpoint, such as http://collector:4318/v1/traces",
    )
    sample: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of requests to trace, among those without a traceparent",
    )
    slow_s: float = Field(
        1.0,
        ge=0,
        description="seconds from which a session's spans record each round",
    )

    @property
    def is_on(self) -> bool:
        return self.endpoint is not None


REFUSED_VLLM_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "async_scheduling": "it schedules a step before the tokens that blocks are matched against are known",
        "speculative_config": "drafts come from drafters; set speculation.draft_tokens for their length",
        "pipeline_parallel_size": "several steps in flight are untested",
        "data_parallel_size": "a replica is one engine; set target.replicas for their number",
        "decode_context_parallel_size": "it is untested",
        "kv_transfer_config": "pages from elsewhere are untested",
        "kv_offloading_size": "pages from elsewhere are untested",
        "kv_offloading_backend": "pages from elsewhere are untested",
        "scheduler_cls": "Slipstream's scheduler accepts the blocks",
        "worker_cls": "Slipstream extends vLLM's own workers with coupled sampling",
        "worker_extension_cls": "Slipstream's extension draws with shared noise",
        "logits_processors": "Slipstream's processor draws with shared noise",
        "skip_tokenizer_init": "the router handles text",
        "runner": "a target generates",
    }
)
"""Arguments that would break a guarantee or that implement one, with the reason."""

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
"""Arguments that have a configuration key of their own."""


def faults_of(arguments: Iterable[str]) -> list[str]:
    """Returns one message for each argument that a target does not accept."""
    faults = []
    for name in arguments:
        if name in REFUSED_VLLM_OPTIONS:
            faults.append(f"vllm.{name} cannot be set: {REFUSED_VLLM_OPTIONS[name]}; remove it")
        elif name in RENAMED_VLLM_OPTIONS:
            faults.append(f"vllm.{name} is {RENAMED_VLLM_OPTIONS[name]} here; set that instead")
    return faults


Quantity = Annotated[str, Field(pattern=r"^\d+(\.\d+)?(m|Ki|Mi|Gi|Ti)?$")]
Component = Literal["certificates", "monitoring", "disruption-budget", "gcs-fault-tolerance"]


class PodOptions(Section):
    """Options of one kind of pod."""

    cpu: Quantity = Field("2", description="CPU request; no limit")
    memory: Quantity = Field("8Gi", description="memory request and limit")
    shared_memory: Quantity = Field("1Gi", description="size of /dev/shm, for NCCL and Ray's object store")
    node_selector: dict[str, str] = Field(default_factory=dict, description="labels of the Kubernetes node")
    tolerations: tuple[str, ...] = Field((), description="keys of tolerated taints")


class PoolPodOptions(PodOptions):
    """Options of a pool's pods. Their GPUs follow from the resources that the pool's replicas reserve."""

    replicas: int = Field(1, gt=0, description="pool replicas per pod")
    idle_s: int = Field(120, gt=0, description="seconds without replicas before a pod is removed")


class VolumeOptions(Section):
    """The volume with the weights. A job fills it; all other pods mount it read-only."""

    size: Quantity = Field("100Gi", description="storage request")
    access: Literal["ReadWriteMany", "ReadWriteOnce"] = Field(
        "ReadWriteMany", description="access mode; ReadWriteOnce: one node only"
    )
    storage_class: str | None = Field(None, description="default: the cluster's")


class KubernetesOptions(Section):
    """Additional settings for `slipstream k8s render`, which nothing else reads."""

    image: str | None = Field(None, description="image of all pods")
    components: tuple[Component, ...] = Field((), description="folders of k8s/components to deploy")
    volume: VolumeOptions = VolumeOptions()
    head: PodOptions = PodOptions()
    router: PodOptions = PodOptions()
    target: PoolPodOptions = PoolPodOptions()
    draft: PoolPodOptions = PoolPodOptions()
