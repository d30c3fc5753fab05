"""Configuration: a frozen pydantic model, read from YAML with overrides from environment and command line.

Each part of the system receives only its own section. `config_sections` contains the sections that do not depend on
others. `load_config` reads a file; its ConfigError lists one line per problem, with the key and the expected value.
For a key of an earlier development version, the error states its new name or a replacement (`MOVED_KEYS`).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, Field, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import ErrorDetails

from cluster.autoscaling import DRAFTER, TARGET, deployment_of
from cluster.config_sections import (
    HEADS,
    LEARNING_METHODS,
    METHOD_SECTIONS,
    MODEL_METHODS,
    PROJECTING_HEADS,
    SHARED_METHODS,
    STATE_READERS,
    ApiKey,
    DraftModelOptions,
    EagleOptions,
    HeadOptions,
    HybridOptions,
    KubernetesOptions,
    LayerSkipOptions,
    NgramOptions,
    Positive,
    Section,
    StatesOptions,
    SuffixOptions,
    TracingConfig,
    TrustConfig,
    faults_of,
)
from cluster.errors import ConfigError
from cluster.learning import Consent
from protos.draft_tree import MAX_BLOCK_TOKENS


def error_lines(error: ValidationError, model: type[BaseModel], whole: str) -> list[str]:
    """Returns one line per error; `whole` is the label of errors that concern no single key."""
    return [f"{'.'.join(map(str, fault['loc'])) or whole}: {_message(fault, model)}" for fault in error.errors()]


PLAIN_MESSAGES: Mapping[str, str] = MappingProxyType(
    {
        "missing": "missing {member}; add it",
        "greater_than": "expected more than {gt}",
        "greater_than_equal": "expected at least {ge}",
        "less_than": "expected less than {lt}",
        "less_than_equal": "expected at most {le}",
        "finite_number": "expected a finite number",
        "literal_error": "expected {expected}",
        "string_pattern_mismatch": "expected a string that matches {pattern}",
        "string_too_short": "expected a string of {min_length} or more characters",
        "string_too_long": "expected a string of at most {max_length} characters",
        "value_error": "{error}",
        **dict.fromkeys(("bool_type", "bool_parsing"), "expected true or false"),
        **dict.fromkeys(("float_type", "float_parsing"), "expected a number"),
        **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "expected an integer"),
        "string_type": "expected a string",
        **dict.fromkeys(("list_type", "tuple_type"), "expected a list"),
        **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "expected {mapping}"),
    }
)
"""Messages by type of pydantic's error, in place of its own."""


def plain_message(fault: ErrorDetails, member: str, mapping: str) -> str:
    """Returns the message of a validation error; `member` and `mapping` are what the format calls these."""
    template = PLAIN_MESSAGES.get(fault["type"])
    return fault["msg"] if template is None else template.format(**fault.get("ctx", {}), member=member, mapping=mapping)


def _message(fault: ErrorDetails, model: type[BaseModel]) -> str:
    if fault["type"] != "extra_forbidden":
        return plain_message(fault, "key", "a mapping")
    *sections, key = map(str, fault["loc"])
    keys = _keys(sections, model)
    close = get_close_matches(key, keys, n=1)
    guess = f"did you mean {close[0]}? " if close else ""
    return f"unknown key; {guess}expected one of {', '.join(keys)}"


def _keys(sections: list[str], model: type[BaseModel]) -> list[str]:
    """Returns the keys of the section at a path of section names."""
    names = iter(sections)
    for name in names:
        annotation = model.model_fields[name].annotation
        model = _section(annotation)
        if get_origin(annotation) is dict:
            next(names)  # skip a user-defined key
    return list(model.model_fields)


def _section(annotation: Any) -> type[BaseModel]:
    """Returns the section type in an annotation: a section, an optional section, or a dict of sections."""
    kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
    return next(kind for kind in kinds if issubclass(kind, BaseModel))


ENVIRONMENT_PREFIX = "SLIPSTREAM__"
Seconds = Annotated[float, Field(gt=0)]


class ModelConfig(Section):
    """The served model."""

    target: str = Field(description="Hugging Face id or folder")
    served_name: str | None = Field(None, description="name in the API; default: last part of `model.target`")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16",
        description="data type of target and draft; on CPUs without AVX-512, float32 verifies blocks faster",
    )
    numerics: Literal["fast", "invariant"] = Field(
        "fast",
        description="invariant: a text's logits are the same bits at any load, draft length and chunking",
    )
    max_context: Positive = Field(2048, description="maximum tokens of prompt and answer")

    @property
    def name(self) -> str:
        return self.served_name or Path(self.target).name


class Resources(Section):
    """Resources reserved by Ray for one model process."""

    num_cpus: float = Field(1, ge=0, description="CPUs; may be fractional")
    num_gpus: float = Field(
        0,
        ge=0,
        description="GPUs, or a fraction of one GPU and its memory",
    )
    accelerator_type: str | None = Field(None, description="Ray accelerator type, such as L4")
    custom: dict[str, float] = Field(default_factory=dict, description="custom Ray resources")
    labels: dict[str, str] = Field(default_factory=dict, description="required labels of the Ray node")
    threads: Positive = Field(1, description="CPU threads for the model")
    cpu_affinity: tuple[int, ...] = Field((), description="allowed CPU cores; empty: all")
    background: bool = Field(False, description="run the model at idle CPU priority")
    cuda_graphs: bool = Field(True, description="capture GPU steps; false if captures fail")

    @model_validator(mode="after")
    def _check_gpus(self) -> Self:
        if self.num_gpus > 1 and self.num_gpus % 1:
            raise ValueError(f"num_gpus is {self.num_gpus:g}, expected a whole number or a fraction below 1")
        return self

    @property
    def gpu_share(self) -> float:
        """Fraction of one GPU that the process may use."""
        return min(self.num_gpus, 1.0) or 1.0


class CacheConfig(Section):
    """Paged KV cache of one model process."""

    page_size: Positive = Field(16, description="tokens per page; sessions share whole pages")
    gib: float | None = Field(
        None,
        gt=0,
        description="size in GiB; default: max_sessions times max_context tokens, at most 0.9 of the memory that the "
        "weights and steps leave in the num_gpus share (on CPUs: half of the free memory); vLLM on GPUs: 0.9 of the "
        "share in all",
    )


class Replicas(Section):
    """Size limits and scaling rules of a pool; equal limits fix its size."""

    min: Annotated[int, Field(ge=0)] = Field(1, description="minimum pool size")
    max: Positive = Field(1, description="maximum pool size")
    sessions_per_replica: float | None = Field(
        None, gt=0, description="desired sessions per replica; default: half of max_sessions"
    )
    up_delay_s: float = Field(10, ge=0, description="delay before adding replicas")
    down_delay_s: float = Field(300, ge=0, description="delay before removing replicas")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"max is {self.max}, expected at least min ({self.min})")
        return self


class TargetReplicas(Replicas):
    """Scaling of the target pool, which is never empty."""

    min: Positive = Field(1, description="minimum pool size")
    first_token_s: Seconds = Field(2, description="time to first token that triggers scale-up")


class DraftReplicas(Replicas):
    """Scaling of the draft pool.

    The pool may be empty; targets then decode without speculation.
    """

    min: Annotated[int, Field(ge=0)] = Field(1, description="minimum pool size; 0: scale to zero without load")
    per_target: float | None = Field(None, gt=0, description="drafters per target replica; default: scale by load")

    @model_validator(mode="after")
    def _one_rule(self) -> Self:
        if self.per_target is not None and self.sessions_per_replica is not None:
            raise ValueError("per_target and sessions_per_replica are mutually exclusive; remove one")
        if self.per_target is not None and self.min == self.max:
            raise ValueError(
                f"per_target is {self.per_target:g}, but min and max fix the pool at {self.max}; raise"
                " draft.replicas.max, or remove per_target"
            )
        return self


def _check_slots(replicas: Replicas, max_sessions: int) -> None:
    """Raises ValueError if the desired number of sessions per replica exceeds the maximum."""
    aim = replicas.sessions_per_replica
    if aim is not None and aim > max_sessions:
        raise ValueError(f"replicas.sessions_per_replica is {aim:g}, expected at most max_sessions ({max_sessions})")


class TargetPool(Section):
    """The pool of tensor-parallel target replicas."""

    engine: Literal["slipstream", "vllm", "mixed"] = Field(
        "slipstream",
        description="inference engine; mixed: half of the replicas use vLLM",
    )
    vllm: dict[str, Any] = Field(default_factory=dict, description="fields of vLLM's EngineArgs")
    adapters: dict[str, str] = Field({}, description="LoRA adapters by API name: Hugging Face id or folder")
    tensor_parallel: Positive = Field(1, description="tensor-parallel ranks per replica")
    replicas: TargetReplicas = TargetReplicas()
    resources_per_rank: Resources = Resources()
    cache_per_rank: CacheConfig = CacheConfig()
    max_sessions: Positive = Field(16, description="maximum concurrent sessions per replica; further sessions queue")
    max_step_tokens: Positive = Field(512, description="maximum tokens per step; longer prompts run in chunks")
    step_timeout_s: Seconds = Field(
        60,
        description="maximum duration of a step; fast steps have shorter limits",
    )
    start_timeout_s: Seconds = Field(
        3600, description="maximum time to load and profile the model, and for routers to fetch its tokenizer"
    )
    drain_s: Seconds = Field(
        30,
        description="grace period for sessions that no other replica accepts",
    )

    @model_validator(mode="after")
    def _check_aim(self) -> Self:
        _check_slots(self.replicas, self.max_sessions)
        return self

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        gpus = self.resources_per_rank.num_gpus
        if self.tensor_parallel > 1 and 0 < gpus <= 0.5:
            raise ValueError(
                f"resources_per_rank.num_gpus is {gpus:g}, so Ray may place several ranks on one GPU, which NCCL does"
                " not support; set num_gpus or tensor_parallel to 1"
            )
        if self.engine == "slipstream" and self.vllm:
            raise ValueError("vllm has arguments, but engine is slipstream; set target.engine to vllm")
        if self.adapters and self.engine != "vllm":
            raise ValueError(f"engine {self.engine} does not support adapters; set engine to vllm, or remove adapters")
        if self.adapters and not self.vllm.get("enable_lora"):
            raise ValueError("adapters require vllm.enable_lora; set it to true, or remove adapters")
        if faults := faults_of(self.vllm):
            raise ValueError("; ".join(faults))
        if self.engine != "slipstream" and self.cache_per_rank.page_size != CacheConfig().page_size:
            raise ValueError(f"with engine {self.engine}, remove cache_per_rank.page_size and set vllm.block_size")
        if self.engine != "slipstream" and self.resources_per_rank.num_gpus not in (0, 1):
            raise ValueError(
                f"resources_per_rank.num_gpus is {self.resources_per_rank.num_gpus:g}, but vLLM uses one whole GPU for"
                " each rank; set it to 1, or set engine to slipstream"
            )
        executor = self.vllm.get("distributed_executor_backend", "ray")
        if self.resources_per_rank.num_gpus and executor != "ray":
            raise ValueError(
                f"vllm.distributed_executor_backend is {executor}, whose ranks would not use the GPUs that are reserved"
                " for the replica; remove it"
            )
        if self.engine != "slipstream" and not self.resources_per_rank.num_gpus and self.cache_per_rank.gib is None:
            raise ValueError(
                "cache_per_rank.gib is missing; set it, or vLLM on CPUs takes nine tenths of the host's memory"
            )
        if self.engine == "mixed" and self.replicas.max < 2:
            raise ValueError("engine is mixed, but replicas.max is 1; set it to at least 2, one per engine")
        return self


def _refuse_earlier_method(value: Any) -> Any:
    """Raises ValueError for a method name of an earlier development version; the message contains the current name."""
    for earlier, name in (("prompt_lookup", "ngram"), ("lookup_first", "hybrid")):
        if value == earlier:
            raise ValueError(f"method {earlier} was renamed to {name}")
    return value


IDLE = Resources(num_cpus=0, background=True)


def _idle_resources(value: Any) -> Any:
    return IDLE if value == "idle" else value


class LearningOptions(Section):
    """Learning from traffic: a trainer improves the draft with finished sessions.

    Without this section, nothing is stored.
    """

    folder: str = Field(description="shared folder of examples and trained versions")
    consent: Consent = Field(
        Consent.OPTED_IN,
        description='opted_in: store only requests with metadata.learn "true"; all: store all except "false"',
    )
    max_tokens: Positive = Field(2_000_000, description="maximum stored tokens; the oldest examples are deleted first")
    max_age_days: float = Field(30, gt=0, description="maximum age of examples")
    max_state_bytes: Positive = Field(4_000_000_000, description="maximum size of stored hidden states")
    resources: Annotated[Resources, BeforeValidator(_idle_resources)] = Field(
        IDLE,
        description="resources reserved for the trainer; idle: none, train at idle CPU priority",
    )
    min_examples: Positive = Field(200, description="new examples that trigger training")
    epochs: float = Field(2, gt=0, description="training epochs")
    learning_rate: float = Field(1.5e-4, gt=0, description="peak learning rate of AdamW")
    replay: str | None = Field(
        None,
        description="file or folder of general conversations in JSON Lines",
    )
    replay_share: float = Field(0.5, ge=0, lt=1, description="share of general conversations in each batch")
    max_general_loss: float = Field(
        0.03, ge=0, description="promotion: maximum drop in agreement on general conversations"
    )
    min_sessions: Positive = Field(16, description="promotion: minimum held-out sessions; training needs twice as many")
    keep_versions: int = Field(4, ge=2, description="versions kept on disk")


class DraftPool(Section):
    """The pool of drafters. Each method has an options section of the same name."""

    method: Annotated[
        Literal[
            "draft_model",
            "ngram",
            "hybrid",
            "layer_skip",
            "suffix",
            "medusa",
            "mlp_speculator",
            "dflash",
            "eagle",
            "mtp",
        ],
        BeforeValidator(_refuse_earlier_method),
    ] = Field(
        "draft_model",
        description="drafting method; see docs/drafts.md",
    )
    model: str | None = Field(None, description="Hugging Face id or folder of the draft")
    tokenizer: str | None = Field(None, description="source of a draft model's tokenizer; default: `draft.model`")
    prompt: Literal["text", "template"] = Field(
        "text",
        description="prompt of translated drafts. template: chats in the draft's own chat template",
    )
    draft_model: DraftModelOptions = DraftModelOptions()
    ngram: NgramOptions = NgramOptions()
    layer_skip: LayerSkipOptions = LayerSkipOptions()
    suffix: SuffixOptions = SuffixOptions()
    hybrid: HybridOptions = HybridOptions()
    medusa: HeadOptions = HeadOptions()
    mlp_speculator: HeadOptions = HeadOptions()
    dflash: HeadOptions = HeadOptions()
    eagle: EagleOptions = EagleOptions()
    mtp: HeadOptions = HeadOptions()
    states: StatesOptions = StatesOptions()
    learning: LearningOptions | None = Field(None, description="learning from traffic; default: disabled")
    replicas: DraftReplicas = DraftReplicas()
    resources: Resources = Resources()
    cache: CacheConfig = CacheConfig()
    max_sessions: Positive = Field(64, description="maximum concurrent sessions per drafter")
    start_timeout_s: Seconds = Field(3600, description="same as `target.start_timeout_s`")

    @property
    def model_method(self) -> str:
        """The method, or for hybrid its model-based method, which may use `model` and hidden states."""
        return self.hybrid.then if self.method == "hybrid" else self.method

    @property
    def template(self) -> str | None:
        """Source of the tokenizer whose chat template renders prompts; None: prompts are translated."""
        return (self.tokenizer or self.model) if self.prompt == "template" else None

    @model_validator(mode="after")
    def _check_method(self) -> Self:
        used_sections = METHOD_SECTIONS[self.method] | METHOD_SECTIONS[self.model_method]
        if self.model_method not in MODEL_METHODS and self.model is not None:
            raise ValueError(f"method {self.method} uses no model; remove draft.model")
        if self.model_method in MODEL_METHODS and self.model is None:
            raise ValueError(f"method {self.method} needs a model; set draft.model to a Hugging Face id or a folder")
        if self.tokenizer is not None and self.model_method != "draft_model":
            raise ValueError(f"method {self.method} has no tokenizer of its own; remove draft.tokenizer")
        if self.prompt == "template" and self.model_method != "draft_model":
            raise ValueError(f"method {self.method} has no chat template of its own; remove draft.prompt")
        for section in sorted(set().union(*METHOD_SECTIONS.values()) - used_sections):
            if getattr(self, section) != type(getattr(self, section))():
                raise ValueError(f"method {self.method} does not use the options in {section}; remove them")
        if self.states != StatesOptions() and self.model_method not in STATE_READERS:
            raise ValueError(f"method {self.method} reads no hidden states; remove the options in states")
        if self.states.project == "target" and self.model_method not in PROJECTING_HEADS:
            raise ValueError(
                f"states.project is target, but method {self.model_method} has no projection; remove states.project"
            )
        for section in ("draft_model", self.model_method):
            quantization = getattr(getattr(self, section), "quantization", "none")
            if quantization == "int8" and self.resources.num_gpus:
                raise ValueError(
                    f"{section}.quantization int8 requires CPUs; set it to fp8 or int4, or resources.num_gpus to 0"
                )
            if quantization in ("fp8", "int4") and not self.resources.num_gpus:
                raise ValueError(
                    f"{section}.quantization {quantization} requires GPUs; set it to int8, or set resources.num_gpus"
                )
        _check_slots(self.replicas, self.max_sessions)
        self._check_learning()
        return self

    def _check_learning(self) -> None:
        if self.learning is None:
            return
        if self.model_method not in LEARNING_METHODS:
            raise ValueError(
                f"method {self.method} does not support learning; remove learning, or set method to one of"
                f" {', '.join(sorted(LEARNING_METHODS))}"
            )
        if self.learning.replay is not None and self.model_method in HEADS:
            raise ValueError(
                "learning.replay needs the target's states, which a head's trainer does not compute; remove it: older"
                " examples are rehearsed"
            )
        if self.learning.resources.background and self.resources.num_gpus:
            raise ValueError("learning.resources is idle, which requires CPUs; set the trainer's resources explicitly")


class SpeculationConfig(Section):
    """Draft length, acceptance rule and schedule of speculation."""

    draft_tokens: int = Field(
        5,
        ge=0,
        le=MAX_BLOCK_TOKENS,
        description="maximum draft length, of which the adaptive schedule uses up to 16; 0: no speculation",
    )
    acceptance: Annotated[
        Literal["coupled", "rejection"], BeforeValidator(lambda value: "rejection" if value == "ratio" else value)
    ] = Field(
        "coupled",
        description="Gumbel coupling or rejection sampling (alias: ratio); seeded requests use coupled",
    )
    schedule: Literal["adaptive", "lock_step"] = Field(
        "adaptive",
        description="adaptive: draft by measured gain; lock_step: always draft draft_tokens tokens for all sessions",
    )

    @property
    def is_lock_step(self) -> bool:
        return self.schedule == "lock_step"


class AuditConfig(Section):
    """Audits: idle targets repeat finished requests without speculation, and routers compare the outputs."""

    share: float = Field(0.0, ge=0, le=1, description="share of requests to audit")
    near_tie: float | None = Field(
        None,
        ge=0,
        description="logit margin below which a mismatch counts as rounding; default: by dtype, 0 if invariant",
    )
    max_waiting: Positive = Field(64, description="maximum queued audits")
    max_waiting_tokens: Positive = Field(1 << 18, description="maximum tokens of queued audits")
    records: str | None = Field(None, description="JSON Lines file for differences")
    max_record_bytes: Positive = Field(1 << 20, description="maximum size of the records file")


class AdminConfig(Section):
    """A separate address for `/metrics` and the live page; it also serves the API."""

    host: str = Field("127.0.0.1", description="bind address of the admin port")
    port: int = Field(
        0,
        ge=0,
        le=65535,
        description="port for `/metrics` and the live page; 0: use server.port",
    )


class ServerConfig(Section):
    """The HTTP API and the routers."""

    host: str = Field("127.0.0.1", description="bind address")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0: any free port")
    routers: Positive = Field(1, description="router replicas; `serve` and `up` default to CPUs / 8, 1 to 4")
    max_body_bytes: Positive = Field(4 << 20, description="maximum size of a request body; otherwise 413")
    body_timeout_s: Seconds = Field(30, description="maximum time to receive a body; otherwise 408")
    request_timeout_s: Seconds | None = Field(
        None,
        description="maximum duration of a request; otherwise 408 or a stream error; default: unlimited",
    )
    keep_alive_s: Positive = Field(60, description="lifetime of idle connections")
    max_requests: Positive = Field(
        1024,
        description="maximum active sessions per router and model, concurrent uploads, and requests queued at Serve's"
        " proxy; otherwise 429",
    )
    max_request_sessions: Positive = Field(
        128, description="maximum sessions per request (prompts times n); otherwise 400"
    )
    generation_defaults: Literal["model", "none"] = Field(
        "model",
        description="source of omitted sampling parameters. model: generation_config.json; none: OpenAI's defaults",
    )
    drain_s: Seconds = Field(30, description="grace period of running requests at shutdown")
    stream_interval: Positive = Field(
        1,
        description="minimum tokens per stream event",
    )
    target_wait_s: Seconds = Field(60, description="maximum wait for a target replica")
    page: bool = Field(True, description="serve the live page at `/`")
    served_names: tuple[str, ...] = Field((), description="additional model names in the API")
    cors_origins: tuple[str, ...] = Field((), description="allowed CORS origins; `*`: all")
    stream_keep_alive_s: Seconds = Field(15, description="interval of keep-alive comments in idle streams")
    keys: dict[str, ApiKey] = Field({}, description="API keys by name; empty: no authentication")
    insecure: bool = Field(False, description="allow a non-loopback address without API keys")
    allow_special_tokens_in_text: bool = Field(False, description="parse control tokens in message text")
    response_template: Literal["auto", "none"] | dict[str, Any] = Field(
        "auto",
        description="template for reasoning and tool calls. auto: from checkpoint or architecture; none: all text is "
        "content",
    )
    log_format: Literal["text", "json"] = Field("text", description="format of log lines")
    admin: AdminConfig = AdminConfig()
    audit: AuditConfig = AuditConfig()


Label = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
"""User-defined name of a model or draft pool; part of deployment names and of Kubernetes names."""


class ModelEntry(Section):
    """One of several served models."""

    model: ModelConfig
    target: TargetPool = TargetPool()
    speculation: SpeculationConfig = SpeculationConfig()
    draft: Label | None = Field(None, description="draft pool in `drafts`; default: the pool in `draft`")


MODEL_SECTIONS = ("model", "target", "speculation")
"""Sections of a single model; with `models`, each entry has its own."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One served model, with the names of the deployments that it uses."""

    config: "SlipstreamConfig"  # as if it were the only model
    target: str
    drafter: str

    @property
    def trainer(self) -> str:
        """The deployment that trains the draft, if it learns."""
        return self.drafter.replace(DRAFTER, "Trainer")

    @property
    def name(self) -> str:
        """The main name in the API."""
        return self.config.model.name


class SlipstreamConfig(Section):
    """Configuration of a deployment.

    The sections `model`, `target` and `speculation` describe a single model. With several `models`, they are those of
    the first one. Code that serves one model receives its configuration from `served`.
    """

    model: ModelConfig
    target: TargetPool = TargetPool()
    draft: DraftPool
    speculation: SpeculationConfig = SpeculationConfig()
    models: dict[Label, ModelEntry] = Field({}, description="several models by name, in place of `model`")
    drafts: dict[Label, DraftPool] = Field({}, description="further draft pools by name")
    server: ServerConfig = ServerConfig()
    trust: TrustConfig = TrustConfig()
    tracing: TracingConfig = TracingConfig()
    kubernetes: KubernetesOptions = KubernetesOptions()

    @property
    def served(self) -> tuple[ServedModel, ...]:
        """All served models."""
        if not self.models:
            return (ServedModel(self, TARGET, DRAFTER),)
        return tuple(
            ServedModel(self._alone(name, entry), deployment_of(TARGET, name), deployment_of(DRAFTER, entry.draft))
            for name, entry in self.models.items()
        )

    @property
    def pools(self) -> dict[str, tuple["SlipstreamConfig", ...]]:
        """The models of each draft pool, by deployment."""
        pools: defaultdict[str, list[SlipstreamConfig]] = defaultdict(list)
        for one in self.served:
            pools[one.drafter].append(one.config)
        return {name: tuple(configs) for name, configs in pools.items()}

    @property
    def served_names(self) -> tuple[str, ...]:
        """All API names of the models, main names first."""
        return tuple(dict.fromkeys((*(one.name for one in self.served), *self.server.served_names)))

    @property
    def api_names(self) -> tuple[str, ...]:
        """All API names of a single model and its adapters."""
        return (*self.served_names, *self.target.adapters)

    def adapter_of(self, name: str) -> str:
        """Returns the adapter with this API name of a single model; empty if the name is the model's own."""
        return name if name in self.target.adapters else ""

    def given(self, **excluded: Any) -> dict[str, Any]:
        """Returns the settings that differ from the defaults, as input of `validated`; omits `excluded` keys."""
        unused = dict.fromkeys(MODEL_SECTIONS, True) if self.models else {}
        return self.model_dump(mode="json", exclude_defaults=True, exclude={**excluded, **unused})

    def _alone(self, name: str, entry: ModelEntry) -> "SlipstreamConfig":
        model = entry.model.model_copy(update={"served_name": entry.model.served_name or name})
        draft = self.draft if entry.draft is None else self.drafts[entry.draft]
        update = {"model": model, "target": entry.target, "speculation": entry.speculation, "draft": draft}
        return self.model_copy(update={**update, "models": {}, "drafts": {}})

    @model_validator(mode="wrap")
    @classmethod
    def _adopt_first_model(cls, data: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Fills the sections of a single model from the first of `models`, then checks each model."""
        if not isinstance(data, dict) or not data.get("models"):
            config = validate(data)
        elif misplaced := [name for name in MODEL_SECTIONS if name in data]:
            raise ValueError(f"{', '.join(misplaced)}: a configuration with models has this below models.NAME; move it")
        else:
            config = validate({**data, "model": ModelConfig(target="")})
            config._check_models()
            first = config.served[0].config
            vars(config).update(
                {name: getattr(first, name) for name in MODEL_SECTIONS}
            )  # frozen for users, not for its validator
        for one in config.served:
            one.config._check_engine_support()
            one.config._check_draft_tokens()
        names = [name for one in config.served for name in one.config.api_names]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"several models or adapters are served as {', '.join(twice)}; rename all but one")
        return config

    def _check_models(self) -> None:
        """Raises ValueError for contradictions between models and draft pools."""
        if unknown := sorted({e.draft for e in self.models.values() if e.draft is not None} - self.drafts.keys()):
            raise ValueError(f"models use draft pools {', '.join(unknown)}, which are missing in drafts; add them")
        if self.server.served_names:
            raise ValueError("server.served_names names a single model; with models, set model.served_name of each")
        pools = self.pools
        for name in (None, *self.drafts):
            key, drafter = "draft" if name is None else f"drafts.{name}", deployment_of(DRAFTER, name)
            if drafter not in pools:
                raise ValueError(f"{key} is the draft pool of no model; remove it or set models.NAME.draft")
            draft = pools[drafter][0].draft
            if len(pools[drafter]) > 1 and (draft.model_method not in SHARED_METHODS or draft.learning is not None):
                what = "learning" if draft.learning is not None else f"method {draft.method}"
                raise ValueError(f"{key} serves several models, but {what} fits only one; use a pool for each model")

    def _check_draft_tokens(self) -> None:
        """Raises ValueError if a step is too small for the longest block and the token before it."""
        longest = self.target.max_step_tokens - 1
        if self.speculation.draft_tokens > longest:
            raise ValueError(
                f"speculation.draft_tokens is {self.speculation.draft_tokens}, expected at most {longest}: a step"
                " verifies a block with the token before it; lower it, or raise target.max_step_tokens"
            )

    def _check_engine_support(self) -> None:
        """Rejects settings that vLLM targets do not support."""
        if self.target.engine == "slipstream":
            return
        if self.model.numerics == "invariant":
            raise ValueError("model.numerics is invariant, which vLLM targets do not support; set it to fast")
        if self.speculation.acceptance == "rejection":
            raise ValueError(
                "speculation.acceptance is rejection, but vLLM targets support only coupled; set it to coupled"
            )
        if self.draft.model_method in STATE_READERS and not self.draft.states.keep:
            raise ValueError("draft.states.keep is false, but vLLM targets cannot recompute hidden states; remove it")


def of_drafters(models: Sequence[SlipstreamConfig]) -> SlipstreamConfig:
    """Returns the configuration of a pool's drafters: the first model's, with the largest limits of all models."""
    first = models[0]
    context = max(one.model.max_context for one in models)
    longest = max(one.speculation.draft_tokens for one in models)
    update = {
        "model": first.model.model_copy(update={"max_context": context}),
        "speculation": first.speculation.model_copy(update={"draft_tokens": longest}),
    }
    return first.model_copy(update=update)


MOVED_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "draft.lookup_max_ngram": "was renamed to draft.ngram.max_ngram",
        "draft.lookup_min_ngram": "was renamed to draft.ngram.min_ngram",
        "draft.prompt_lookup": "was renamed to draft.ngram",
        "draft.lookup_first": "was renamed to draft.hybrid",
        "speculation.max_draft_tokens": "was renamed to speculation.draft_tokens",
        "speculation.pacing": "was renamed to speculation.schedule",
        "server.operators": "was renamed to server.admin",
        "draft.quantization": "was renamed to draft.draft_model.quantization",
        "speculation.draft_probs_top_k": "was renamed to draft.draft_model.draft_probs_top_k",
        "speculation.min_confidence": "was renamed to draft.draft_model.min_confidence",
        "speculation.alternatives": "was removed; drafts are trees wherever the target's attention supports them;"
        " remove the key",
        "speculation.draft_ahead": "was removed; set speculation.schedule to lock_step to disable drafting ahead",
    }
)
"""Keys of earlier development versions, with the rest of the error message."""


def load_config(
    path: Path, overrides: Iterable[str] = (), environment: Mapping[str, str] | None = None
) -> SlipstreamConfig:
    """Loads a YAML file. Environment variables (SLIPSTREAM__SECTION__KEY) override the file, and `overrides`
    (`section.key=value`) override both.

    Relative paths of model folders and credentials are resolved against the file's folder. Raises ConfigError, which
    names the key.
    """
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {_yaml_problem(error)}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is not a mapping; expected sections such as model, target and draft")
    for name, value in sorted((environment or {}).items()):
        if name.startswith(ENVIRONMENT_PREFIX):
            _override(data, name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"), value, name)
    apply_overrides(data, overrides)
    for entry in (data, *_sections(data, "models")):
        _expand_model_path(entry.get("model"), "target", path.parent)
        target = entry.get("target")
        adapters = target.get("adapters") if isinstance(target, dict) else None
        for name in adapters if isinstance(adapters, dict) else ():
            _expand_model_path(adapters, name, path.parent)
    for draft in (data.get("draft"), *_sections(data, "drafts")):
        _expand_model_path(draft, "model", path.parent)
        _expand_model_path(draft, "tokenizer", path.parent)
    if isinstance(trust := data.get("trust"), dict):
        for key in trust.keys() & {"certificates", "token_file"}:
            if isinstance(trust[key], str):
                trust[key] = str(path.parent / Path(trust[key]).expanduser())
    return validated(data)


def apply_overrides(data: dict[str, Any], overrides: Iterable[str]) -> None:
    """Applies overrides of the form `section.key=value`, with YAML values. Raises ConfigError if one is malformed."""
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator:
            raise ConfigError(f"override '{override}' is malformed; expected section.key=value")
        _override(data, key.split("."), value, key)


def validated(data: Mapping[str, Any]) -> SlipstreamConfig:
    """Validates `data`; raises ConfigError with one line per invalid key."""
    moved = [f"{key} {message}" for key, message in MOVED_KEYS.items() if _has(data, key)]
    if moved:
        raise ConfigError("invalid configuration\n  " + "\n  ".join(moved))
    try:
        return SlipstreamConfig.model_validate(data)
    except ValidationError as error:
        lines = error_lines(error, SlipstreamConfig, whole="config")
        raise ConfigError("invalid configuration\n  " + "\n  ".join(lines)) from error


def _has(data: Any, key: str) -> bool:
    """Returns True if `data` contains a dotted key."""
    section, _, rest = key.partition(".")
    return isinstance(data, Mapping) and section in data and (not rest or _has(data[section], rest))


def _override(data: dict[str, Any], keys: list[str], value: str, name: str) -> None:
    section: Any = data
    for key in keys[:-1]:
        section = section.setdefault(key, {})
        if not isinstance(section, dict):
            raise ConfigError(f"{name}: '{key}' is not a section")
    try:
        section[keys[-1]] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: '{value}' is not valid YAML: {_yaml_problem(error)}") from error


def _yaml_problem(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    """Returns a syntax error's position and problem; PyYAML's own message cites a `<unicode string>`."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return str(error).replace('\n  in "<unicode string>",', ", at")
    mark = error.problem_mark
    context = "" if error.context is None else f", {error.context}"
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}{context}"


def _sections(data: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Returns the mappings among the sections with user-defined names below a key."""
    named = data.get(key)
    return [part for part in named.values() if isinstance(part, dict)] if isinstance(named, dict) else []


def _expand_model_path(part: Any, key: str, base: Path) -> None:
    """Makes paths of local folders absolute; keeps other values, which are Hugging Face ids."""
    if not isinstance(part, dict) or not isinstance(part.get(key), str):
        return
    path = Path(part[key]).expanduser()
    if path.is_absolute() or part[key].startswith("."):
        part[key] = str(path if path.is_absolute() else (base / path).resolve())
    elif (base / path).is_dir():
        part[key] = str((base / path).resolve())
