"""Options of drafting methods, one section of `draft` each, and the sections that each method uses.

Trust settings between a deployment's processes: certificates, a shared token, or neither.

API key settings of a deployment: the digest of each client key, with limits of its own.

Tracing settings of a deployment: where spans are sent, for which share of requests, and which in detail.

Checks of `target.vllm`: the arguments of vLLM that a target refuses, and why.

Pure; vLLM need not be installed. vLLM itself refuses unknown names when it starts.

The part of the configuration that only Kubernetes needs: image, pods and volume, for `slipstream k8s render`.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from cluster.errors import ModelError
from protos.messages import StatesNeeded

Positive = Annotated[int, Field(gt=0)]


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DraftModelOptions(_Options):
    """Options of the methods that run a draft model."""

    quantization: Literal["none", "int8"] = Field(
        "none",
        description="int8: the draft model's matrix products in 8 bits, on CPUs; about twice as fast, and only what is"
        " proposed changes, never an answer",
    )
    min_confidence: float = Field(
        0.0,
        ge=0,
        le=1,
        description="a block that is waited for ends once its chance to be accepted so far is below; not under ratio",
    )
    draft_probs_top_k: int = Field(64, ge=1, le=1024, description="entries of draft_probs per token, for ratio")


class NgramOptions(_Options):
    """Options of the methods that search the text for its continuation: ngram and hybrid."""

    max_ngram: Positive = Field(4, description="longest suffix of the text that is searched for")
    min_ngram: Positive = Field(2, description="shortest suffix of the text that is searched for")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_ngram < self.min_ngram:
            raise ValueError(f"max_ngram is {self.max_ngram}, expected at least min_ngram, which is {self.min_ngram}")
        return self


class LayerSkipOptions(_Options):
    """Options of layer_skip, which drafts with some of the target's layers."""

    layers: Positive | tuple[int, ...] = Field(
        4, description="the target's first so many layers, or the ids of its layers, from 0 and rising"
    )

    @model_validator(mode="after")
    def _rising(self) -> Self:
        if isinstance(self.layers, int):
            return self
        if not self.layers or self.layers[0] < 0 or list(self.layers) != sorted(set(self.layers)):
            raise ValueError(
                f"layers are {list(self.layers)}, expected at least one id, from 0, each higher than the last"
            )
        return self

    @property
    def ids(self) -> tuple[int, ...]:
        """Layer ids, from 0."""
        return tuple(range(self.layers)) if isinstance(self.layers, int) else self.layers


class SuffixOptions(_Options):
    """Options of suffix, which searches the text and ended answers for the continuation."""

    max_ngram: Positive = Field(16, description="most tokens of the text's end that are compared")
    min_ngram: Positive = Field(2, description="fewest tokens of the text's end that must be alike")
    remembered_tokens: int = Field(
        1 << 17, ge=0, description="of recent answers, some 200 bytes each; 0: a text is looked up in itself alone"
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_ngram < self.min_ngram:
            raise ValueError(f"max_ngram is {self.max_ngram}, expected at least min_ngram, which is {self.min_ngram}")
        return self


class HybridOptions(_Options):
    """Options of hybrid; those of the method that it asks when unsure are in that method's section."""

    then: Literal["draft_model", "medusa", "mlp_speculator", "dflash", "eagle", "mtp"] = Field(
        "draft_model", description="method that is asked in doubt, with draft.model as its checkpoint, if it has one"
    )


class HeadOptions(_Options):
    """Options of a method that drafts with a published head, which reads the target's hidden states."""

    draft_probs_top_k: int = Field(64, ge=1, le=1024, description="entries of draft_probs per token, for ratio")
    quantization: Literal["none", "int8"] = Field(
        "none",
        description="int8: the head's matrix products in 8 bits, on CPUs; only what is proposed changes, never an"
        " answer",
    )


class EagleOptions(HeadOptions):
    """Options of eagle.

    All but the inherited ones override the published head's configuration; by default the head's apply.
    """

    states: tuple[int, ...] | None = Field(
        None,
        description="which of the target's states an EAGLE-3 head reads side by side, rising: k is the stream after k"
        " layers",
    )
    layer_ids: Literal["state", "output"] | None = Field(
        None,
        description="what a layer id k in an EAGLE-3 head's configuration means: state k, or the output of layer k,"
        " which is state k + 1; a wrong one costs most of the acceptance",
    )
    output_norm: Literal["nothing", "logits", "both"] | None = Field(
        None,
        description="what the norm after the head's last layer is for: the logits, or the states that it goes on from"
        " too; overrides norm_output, which SpecForge's files of before September 2026 mean otherwise",
    )
    max_positions: Positive | None = Field(
        None, description="positions that the head takes; published ones often say 2048, whatever they were trained for"
    )

    @field_validator("states")
    @classmethod
    def _rising(cls, states: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if states is not None and (not states or states[0] < 0 or list(states) != sorted(set(states))):
            raise ValueError(f"states are {list(states)}, expected at least one, from 0, each higher than the last")
        return states


class StatesOptions(_Options):
    """Transport of the target's hidden states to methods that read them."""

    project: Literal["auto", "target", "drafter"] = Field(
        "auto",
        description="where they go through the projection that an EAGLE-3 or DFlash head begins with: at the target,"
        " they are kept and travel in one hidden size a token instead of one a layer, and drafts are the same. auto: at"
        " the target, if the head has a projection and it makes them narrower; target is refused for heads without one",
    )
    dtype: Literal["bfloat16", "float8"] = Field(
        "bfloat16", description="of what is kept and sent; float8 takes half of the bytes, with one scale a token"
    )

    keep: bool = Field(
        True,
        description="whether the target keeps them beside its KV cache, for as long. Where it does not, they take no"
        " memory there, and for a new drafter and for what was found in the cache they are computed again: for medusa"
        " and mlp_speculator of the last token, for eagle, dflash and mtp of the last `window` ones",
    )

    window: Positive = Field(
        512,
        description="without keep: of how many of a text's last tokens eagle, dflash and mtp read states where those of"
        " earlier ones would be computed again. They take the text to begin there: fewer cost less at the target, and"
        " some acceptance",
    )

    kept_tokens: Positive | None = Field(
        None,
        description="whose states a drafter keeps, of all sessions together. At this bound it takes no session whose"
        " text has no room, and gives one up that grows beyond it; the router looks for another drafter. default: as"
        " many as draft.max_sessions of model.max_context have",
    )

    def projects_at_target(self, needed: StatesNeeded) -> bool:
        """Returns True if the target applies the method's projection.

        Raises ModelError if `project` is `target` and the head has no projection.
        """
        narrowed = needed.projected_width
        if self.project == "target" and narrowed is None:
            raise ModelError(
                "draft.states.project is target, but the head that draft.model names begins with no projection of the"
                " target's states alone; set it to auto or drafter"
            )
        if self.project == "auto":
            return narrowed is not None and narrowed < needed.width
        return self.project == "target"


SECTIONS_TAKEN: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "draft_model": frozenset({"draft_model"}),
        "ngram": frozenset({"ngram"}),
        "hybrid": frozenset({"hybrid", "ngram"}),
        "layer_skip": frozenset({"draft_model", "layer_skip"}),
        "suffix": frozenset({"suffix"}),
        "medusa": frozenset({"medusa"}),
        "mlp_speculator": frozenset({"mlp_speculator"}),
        "dflash": frozenset({"dflash"}),
        "eagle": frozenset({"eagle"}),
        "mtp": frozenset({"mtp"}),
    }
)
"""Sections that each method uses; hybrid also uses those of the method that it asks."""

HEADS = frozenset({"medusa", "mlp_speculator", "dflash", "eagle"})
"""Methods whose checkpoint is a head, which reads the target's hidden states and has no tokenizer."""

STATE_READERS = HEADS | {"mtp"}
"""Methods that read the target's hidden states; an MTP module is part of the target's own checkpoint."""

PROJECTING_HEADS = frozenset({"dflash", "eagle"})
"""Heads that may begin with a projection of the states alone; the checkpoint shows whether one does."""

TAKING_MODELS = frozenset({"draft_model"}) | HEADS
"""Methods that load a checkpoint of their own; hybrid does if the method that it asks does."""


class TrustConfig(BaseModel):
    """Authentication of routers, drafters and targets on their gRPC streams: `certificates`, `token_file` or neither.

    With neither, servers listen on loopback only, unless `insecure` is set because the network is trusted.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    certificates: str | None = Field(
        None,
        description="folder with tls.crt, tls.key and ca.crt, as cert-manager writes them: mutual TLS, with the role in"
        " the certificate; {role} in it stands for router, drafter or target; read again for each connection",
    )
    token_file: str | None = Field(
        None,
        description="file of shared tokens, one a line: the first is sent, each is accepted. It says who belongs here,"
        " not in which role, and nothing is encrypted; read again for each stream",
    )
    insecure: bool = Field(
        False,
        description="whether servers may listen beyond loopback with neither of them: whoever connects is trusted",
    )
    reflection: bool = Field(False, description="whether gRPC servers describe their services to whom they serve")
    max_streams_per_host: Positive = Field(
        256,
        description="streams that one server keeps to peers of one host, those that have not greeted yet among them",
    )

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        given = {"certificates": self.certificates, "token_file": self.token_file, "insecure": self.insecure or None}
        named = [key for key, value in given.items() if value is not None]
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)} are given, expected at most one of {', '.join(given)}")
        return self

    @property
    def is_off(self) -> bool:
        """True if nothing is configured."""
        return self.certificates is None and self.token_file is None and not self.insecure


class ApiKey(BaseModel):
    """One client's key, as its digest.

    No configuration holds the key itself; `slipstream key` makes a key and its digest.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the key, in hexadecimal digits")
    max_sessions: Positive | None = Field(
        None, description="sessions in flight per router that this key may have; more get 429"
    )
    max_tokens: Positive | None = Field(
        None, description="most tokens of one answer; who asks for more gets 400, who asks for no number this one"
    )
    cache_salt: str | None = Field(
        None,
        description="whose cached prefixes this key's prompts may find: those of keys with the same salt; default: of"
        " this key alone",
    )


class TracingConfig(BaseModel):
    """OpenTelemetry spans of requests, from HTTP through router, drafter and target; off without an `endpoint`.

    Needs the extra `tracing`: `pip install '.[tracing]'`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint: Annotated[str, Field(pattern=r"^https?://[^\s/]+")] | None = Field(
        None, description="where spans are sent by OTLP over HTTP, as http://collector:4318/v1/traces; default: nowhere"
    )
    sample: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of the requests that is traced, of those without a traceparent, whose own flag decides",
    )
    slow_s: float = Field(
        1.0,
        ge=0,
        description="how long a traced session must take for its spans to tell of each round; 0: all do",
    )

    @property
    def is_on(self) -> bool:
        return self.endpoint is not None


BREAKS: Mapping[str, str] = MappingProxyType(
    {
        "async_scheduling": "a step would be scheduled before the tokens are known that blocks are matched by",
        "speculative_config": "drafts come from drafters; speculation.draft_tokens says how long they are",
        "pipeline_parallel_size": "several steps at once have not been tried",
        "data_parallel_size": "a replica is one engine; target.replicas says how many there are",
        "decode_context_parallel_size": "it has not been tried",
        "kv_transfer_config": "pages that come from elsewhere have not been tried",
        "kv_offloading_size": "pages that come from elsewhere have not been tried",
        "kv_offloading_backend": "pages that come from elsewhere have not been tried",
        "scheduler_cls": "it is what takes the blocks",
        "worker_cls": "workers are vLLM's own, extended to draw with shared noise",
        "worker_extension_cls": "it is what draws with shared noise",
        "logits_processors": "it is what draws with shared noise",
        "skip_tokenizer_init": "text is the router's",
        "runner": "a target generates",
    }
)
"""Arguments that would break a guarantee or that implement one, with the reason."""

ELSEWHERE: Mapping[str, str] = MappingProxyType(
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
    found = []
    for name in arguments:
        if name in BREAKS:
            found.append(f"vllm.{name} cannot be set: {BREAKS[name]}; leave it out")
        elif name in ELSEWHERE:
            found.append(f"vllm.{name} is {ELSEWHERE[name]} here; set that, and leave it out")
    return found


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
