"""The configuration: one frozen pydantic model, read from YAML and overridden by environment and command line.

Each part of the system receives only the section that it needs. Sections without dependencies on others are in
`config_sections`. `load_config` reads a file; each problem becomes one line of a ConfigError, with the key and what
was expected. Keys and values of earlier releases are refused with their current names (`MOVED_KEYS`).
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from cluster.config_sections import (
    LEARNING_METHODS,
    METHOD_SECTIONS,
    MODEL_METHODS,
    PROJECTING_HEADS,
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
    """Returns one line per error; `whole` names the file for errors without a key."""
    return [f"{'.'.join(map(str, fault['loc'])) or whole}: {_message(fault, model)}" for fault in error.errors()]


def _message(fault: ErrorDetails, model: type[BaseModel]) -> str:
    if fault["type"] != "extra_forbidden":
        return fault["msg"]
    *sections, key = map(str, fault["loc"])
    keys = _keys(sections, model)
    close = get_close_matches(key, keys, n=1)
    guess = f"did you mean {close[0]}? " if close else ""
    return f"there is no such key; {guess}expected one of {', '.join(keys)}"


def _keys(sections: list[str], model: type[BaseModel]) -> list[str]:
    """Returns the keys of a section, given the path of section names that leads to it."""
    names = iter(sections)
    for name in names:
        annotation = model.model_fields[name].annotation
        model = _section(annotation)
        if get_origin(annotation) is dict:
            next(names)  # a key that the user chose
    return list(model.model_fields)


def _section(annotation: Any) -> type[BaseModel]:
    """Returns the section type of a field annotated with a section, an optional section, or a dict of sections."""
    kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
    return next(kind for kind in kinds if issubclass(kind, BaseModel))


ENVIRONMENT_PREFIX = "SLIPSTREAM__"
Seconds = Annotated[float, Field(gt=0)]


class ModelConfig(Section):
    """The model that is served."""

    target: str = Field(description="Hugging Face id or folder of the target; relative paths start at the file")
    served_name: str | None = Field(None, description="model name in the API; default: the last part of target")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16", description="type of weights and activations, target and draft"
    )
    max_context: Positive = Field(2048, description="tokens of a session, prompt included")

    @property
    def name(self) -> str:
        return self.served_name or Path(self.target).name


class Resources(Section):
    """Resources that Ray reserves for one process that runs a model."""

    num_cpus: float = Field(1, ge=0, description="CPUs or a fraction")
    num_gpus: float = Field(
        0,
        ge=0,
        description="GPUs or a fraction, which limits memory too",
    )
    accelerator_type: str | None = Field(None, description="Ray accelerator type, such as L4")
    custom: dict[str, float] = Field(default_factory=dict, description="custom Ray resources")
    labels: dict[str, str] = Field(default_factory=dict, description="labels that the Ray node must have")
    threads: Positive = Field(1, description="CPU threads of the model")
    cpu_affinity: tuple[int, ...] = Field((), description="cores to run on; empty: any")
    background: bool = Field(False, description="run the model at idle priority")

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
    """The paged KV cache of one process that runs a model."""

    page_size: Positive = Field(16, description="tokens per page; sessions share whole pages")
    gib: float | None = Field(
        None,
        gt=0,
        description="memory of the cache; default: max_sessions times max_context tokens, at most half of the free"
        " memory; on a GPU, nine tenths of it or of the num_gpus fraction",
    )


class Replicas(Section):
    """Bounds of a pool and rules for scaling between them; equal bounds fix its size."""

    min: Annotated[int, Field(ge=0)] = Field(1, description="fewest replicas")
    max: Positive = Field(1, description="most replicas")
    sessions_per_replica: float | None = Field(
        None, gt=0, description="sessions per replica that autoscaling aims for; default: half of max_sessions"
    )
    up_delay_s: float = Field(10, ge=0, description="seconds of higher demand before replicas are added")
    down_delay_s: float = Field(300, ge=0, description="seconds of lower demand before replicas are removed")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"max is {self.max}, expected at least min, which is {self.min}")
        return self


class TargetReplicas(Replicas):
    """Scaling of the target pool, which is never empty."""

    min: Positive = Field(1, description="fewest replicas")
    first_token_s: Seconds = Field(2, description="seconds to first token above which waiting prompts add replicas")


class DraftReplicas(Replicas):
    """Scaling of the draft pool.

    It may be empty; targets then decode without speculation until drafters are started.
    """

    min: Annotated[int, Field(ge=0)] = Field(1, description="fewest replicas; 0: none without load")
    per_target: float | None = Field(None, gt=0, description="drafters per target replica; default: scale by load")

    @model_validator(mode="after")
    def _one_rule(self) -> Self:
        if self.per_target is not None and self.sessions_per_replica is not None:
            raise ValueError("per_target and sessions_per_replica exclude each other; leave one out")
        return self


def _check_slots(replicas: Replicas, max_sessions: int) -> None:
    """Raises ValueError if autoscaling aims at more sessions per replica than one accepts."""
    aim = replicas.sessions_per_replica
    if aim is not None and aim > max_sessions:
        raise ValueError(
            f"replicas.sessions_per_replica is {aim:g}, expected at most max_sessions, which is {max_sessions}"
        )


class TargetPool(Section):
    """The pool of tensor-parallel target replicas."""

    engine: Literal["slipstream", "vllm", "mixed"] = Field(
        "slipstream",
        description="vllm: vLLM computes; drafts are chains, acceptance is coupled. mixed: every second replica uses"
        " vLLM",
    )
    vllm: dict[str, Any] = Field(default_factory=dict, description="vLLM EngineArgs, such as quantization")
    tensor_parallel: Positive = Field(1, description="ranks per replica")
    replicas: TargetReplicas = TargetReplicas()
    resources_per_rank: Resources = Resources()
    cache_per_rank: CacheConfig = CacheConfig()
    max_sessions: Positive = Field(16, description="concurrent sessions per replica; more queue")
    max_step_tokens: Positive = Field(512, description="tokens per forward; longer prompts are prefilled in chunks")
    step_timeout_s: Seconds = Field(
        60,
        description="seconds of a step after which the replica ends; also after thirty times the measured time, but"
        " at least ten seconds",
    )
    start_timeout_s: Seconds = Field(
        3600, description="seconds to load and measure the model; then the replica is replaced"
    )
    drain_s: Seconds = Field(30, description="seconds that a stopping replica serves sessions that fit nowhere else")

    @model_validator(mode="after")
    def _check_aim(self) -> Self:
        _check_slots(self.replicas, self.max_sessions)
        return self

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        if self.engine == "slipstream" and self.vllm:
            raise ValueError("vllm has arguments, but engine is slipstream; set target.engine to vllm")
        if faults := faults_of(self.vllm):
            raise ValueError("; ".join(faults))
        if self.engine != "slipstream" and self.cache_per_rank.page_size != CacheConfig().page_size:
            raise ValueError(f"with engine {self.engine}, remove cache_per_rank.page_size and set vllm.block_size")
        if self.engine != "slipstream" and not self.resources_per_rank.num_gpus and self.cache_per_rank.gib is None:
            raise ValueError(
                "cache_per_rank.gib is missing, and vLLM would take nine tenths of the host's memory; set it"
            )
        if self.engine == "mixed" and self.replicas.max < 2:
            raise ValueError(
                "engine is mixed, but replicas.max is 1; a mixed pool has a replica of each engine, so set at least 2"
            )
        return self


def _refuse_earlier_method(value: Any) -> Any:
    """Raises ValueError with the current name for a method name of an earlier release."""
    for earlier, name in (("prompt_lookup", "ngram"), ("lookup_first", "hybrid")):
        if value == earlier:
            raise ValueError(f"method {earlier} is named {name} now")
    return value


IDLE = Resources(num_cpus=0, background=True)


def _idle_resources(value: Any) -> Any:
    return IDLE if value == "idle" else value


class LearningOptions(Section):
    """Learning from traffic: finished sessions become examples, from which a trainer improves the draft.

    The section is absent by default, and nothing is kept.
    """

    folder: str = Field(description="folder of examples and trained versions, shared by routers, trainer and drafters")
    consent: Consent = Field(
        Consent.OPTED_IN,
        description='opted_in: keep requests with metadata.learn "true"; all: keep those without "false"',
    )
    max_tokens: Positive = Field(2_000_000, description="tokens of examples to keep; the oldest leave first")
    max_age_days: float = Field(30, gt=0, description="days to keep an example")
    max_state_bytes: Positive = Field(
        4_000_000_000, description="bytes of hidden states to keep, from which heads learn; the oldest leave first"
    )
    resources: Annotated[Resources, BeforeValidator(_idle_resources)] = Field(
        IDLE,
        description="reserved for the trainer; idle: nothing, it computes on idle cores (CPUs only)",
    )
    min_examples: Positive = Field(200, description="new examples that start training")
    epochs: float = Field(2, gt=0, description="passes over the examples")
    learning_rate: float = Field(1.5e-4, gt=0, description="of AdamW, at its highest")
    replay: str | None = Field(
        None,
        description="file or folder of general conversations (JSON lines), against forgetting",
    )
    replay_share: float = Field(0.5, ge=0, lt=1, description="share of general examples in each batch")
    max_general_loss: float = Field(0.03, ge=0, description="agreement on general examples that a promotion may cost")
    min_sessions: Positive = Field(16, description="held-out sessions that a promotion needs")
    keep_versions: int = Field(4, ge=2, description="versions to keep on disk")


class DraftPool(Section):
    """The pool of drafters. Each method's options are in the section of its name."""

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
        description="drafting method, see docs/drafts.md",
    )
    model: str | None = Field(None, description="Hugging Face id or folder of the draft model or head")
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
    learning: LearningOptions | None = Field(None, description="learning from traffic; default: off")
    replicas: DraftReplicas = DraftReplicas()
    resources: Resources = Resources()
    cache: CacheConfig = CacheConfig()
    max_sessions: Positive = Field(64, description="concurrent sessions per drafter")
    start_timeout_s: Seconds = Field(3600, description="as `target.start_timeout_s`")

    @property
    def model_method(self) -> str:
        """The method that drafts with `model` and may read hidden states; for hybrid, its model-based method."""
        return self.hybrid.then if self.method == "hybrid" else self.method

    @model_validator(mode="after")
    def _check_method(self) -> Self:
        used_sections = METHOD_SECTIONS[self.method] | METHOD_SECTIONS[self.model_method]
        if self.model_method not in MODEL_METHODS and self.model is not None:
            raise ValueError(f"method {self.method} takes no model; remove draft.model")
        if self.model_method in MODEL_METHODS and self.model is None:
            raise ValueError(f"method {self.method} needs a model: a Hugging Face id or a folder")
        for section in sorted(set().union(*METHOD_SECTIONS.values()) - used_sections):
            if getattr(self, section) != type(getattr(self, section))():
                raise ValueError(f"{section} has options, but method {self.method} does not read them; remove them")
        if self.states != StatesOptions() and self.model_method not in STATE_READERS:
            raise ValueError(f"states has options, but method {self.method} reads no hidden states; remove them")
        if self.states.project == "target" and self.model_method not in PROJECTING_HEADS:
            raise ValueError(f"states.project is target, but method {self.model_method} has no projection; remove it")
        for section in ("draft_model", self.model_method):
            quantization = getattr(getattr(self, section), "quantization", "none")
            if quantization != "none" and self.resources.num_gpus:
                raise ValueError(f"{section}.quantization {quantization} is for CPUs; remove it")
        _check_slots(self.replicas, self.max_sessions)
        self._check_learning()
        return self

    def _check_learning(self) -> None:
        if self.learning is None:
            return
        if self.model_method not in LEARNING_METHODS:
            raise ValueError(
                f"learning is configured, but method {self.method} does not learn; remove it, or set method to one of"
                f" {', '.join(sorted(LEARNING_METHODS))}"
            )
        if self.learning.resources.background and self.resources.num_gpus:
            raise ValueError("learning.resources is idle, which is for CPUs; give the trainer resources of its own")


class SpeculationConfig(Section):
    """Draft length, acceptance rule and schedule of speculation."""

    draft_tokens: int = Field(
        5, ge=0, le=MAX_BLOCK_TOKENS, description="largest draft length, in tokens; 0: no speculation"
    )
    acceptance: Annotated[
        Literal["coupled", "rejection"], BeforeValidator(lambda value: "rejection" if value == "ratio" else value)
    ] = Field(
        "coupled",
        description="Gumbel coupling or rejection sampling (alias: ratio); requests with a seed use coupled",
    )
    schedule: Literal["adaptive", "lock_step"] = Field(
        "adaptive",
        description="adaptive: lengths and waiting by measured benefit; lock_step: draft draft_tokens for all"
        " sessions, then verify all",
    )

    @property
    def is_lock_step(self) -> bool:
        return self.schedule == "lock_step"


class AuditConfig(Section):
    """Audits of finished requests: an idle target decides them again without speculation, and the router compares."""

    share: float = Field(0.0, ge=0, le=1, description="share of requests to audit")
    near_tie: float | None = Field(
        None, ge=0, description="margin in logits below which a difference is rounding; default: by model.dtype"
    )
    max_waiting: Positive = Field(64, description="waiting requests; more are dropped")
    max_waiting_tokens: Positive = Field(1 << 18, description="tokens of waiting requests, prompts included")
    records: str | None = Field(None, description="file for differences as JSON lines; default: log only")
    max_record_bytes: Positive = Field(1 << 20, description="size at which the file stops growing")


class AdminConfig(Section):
    """A separate address for `/metrics` and the live page; it serves the API, too."""

    host: str = Field("127.0.0.1", description="address of the port below, on each machine with a router")
    port: int = Field(
        0,
        ge=0,
        le=65535,
        description="separate port for `/metrics` and the live page; 0: server.port serves them",
    )


class ServerConfig(Section):
    """The HTTP API and the routers."""

    host: str = Field("127.0.0.1", description="address; 0.0.0.0: all interfaces")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0: any free one")
    routers: Positive = Field(1, description="router replicas")
    max_body_bytes: Positive = Field(4 << 20, description="largest request body; else 413")
    body_timeout_s: Seconds = Field(30, description="seconds to receive a body; else 408")
    request_timeout_s: Seconds | None = Field(
        None,
        description="seconds for a whole request; else 408, or an error in the stream; default: none",
    )
    keep_alive_s: Positive = Field(60, description="seconds that an idle connection stays open")
    max_requests: Positive = Field(
        1024,
        description="sessions in flight per router, bodies read at once, and requests queued at Serve's proxy; else"
        " 429",
    )
    max_request_sessions: Positive = Field(128, description="sessions of one request: prompts times n; else 400")
    generation_defaults: Literal["model", "none"] = Field(
        "model",
        description="model: omitted sampling parameters come from generation_config.json; none: from OpenAI's defaults",
    )
    drain_s: Seconds = Field(30, description="seconds that running requests may continue after a stop")
    stream_interval: Positive = Field(
        1,
        description="tokens per stream event, at least; more cost less CPU",
    )
    target_wait_s: Seconds = Field(60, description="seconds that a request waits for a target replica")
    page: bool = Field(True, description="serve the live page at `/`")
    served_names: tuple[str, ...] = Field((), description="further model names")
    cors_origins: tuple[str, ...] = Field((), description="origins whose pages may call the API; `*`: all")
    stream_keep_alive_s: Seconds = Field(15, description="seconds of silence before a stream gets a comment")
    keys: dict[str, ApiKey] = Field({}, description="API keys, by names of your choice; empty: no key is needed")
    insecure: bool = Field(False, description="allow an address beyond loopback without keys")
    allow_special_tokens_in_text: bool = Field(False, description="parse control tokens spelled in messages")
    response_template: Literal["auto", "none"] | dict[str, Any] = Field(
        "auto",
        description="transformers response template for reasoning and tool calls; auto: the checkpoint's or the"
        " architecture's; none: all is content",
    )
    log_format: Literal["text", "json"] = Field("text", description="format of log lines")
    admin: AdminConfig = AdminConfig()
    audit: AuditConfig = AuditConfig()


class SlipstreamConfig(Section):
    """The whole configuration of a deployment."""

    model: ModelConfig
    target: TargetPool = TargetPool()
    draft: DraftPool
    speculation: SpeculationConfig = SpeculationConfig()
    server: ServerConfig = ServerConfig()
    trust: TrustConfig = TrustConfig()
    tracing: TracingConfig = TracingConfig()
    kubernetes: KubernetesOptions = KubernetesOptions()

    @property
    def served_names(self) -> tuple[str, ...]:
        """All API names of the model, its main name first."""
        return tuple(dict.fromkeys((self.model.name, *self.server.served_names)))

    @model_validator(mode="after")
    def _check_engine_support(self) -> Self:
        """Rejects settings that vLLM targets lack: rejection sampling, and hidden states that are not kept."""
        if self.target.engine == "slipstream":
            return self
        if self.speculation.acceptance == "rejection":
            raise ValueError("speculation.acceptance is rejection, but a vLLM target only supports coupled")
        if self.draft.model_method in STATE_READERS and not self.draft.states.keep:
            raise ValueError("draft.states.keep is false, but a vLLM target cannot recompute hidden states; remove it")
        return self


MOVED_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "draft.lookup_max_ngram": "is draft.ngram.max_ngram now",
        "draft.lookup_min_ngram": "is draft.ngram.min_ngram now",
        "draft.prompt_lookup": "is draft.ngram now",
        "draft.lookup_first": "is draft.hybrid now",
        "speculation.max_draft_tokens": "is speculation.draft_tokens now",
        "speculation.pacing": "is speculation.schedule now",
        "server.operators": "is server.admin now",
        "draft.quantization": "is draft.draft_model.quantization now",
        "speculation.draft_probs_top_k": "is draft.draft_model.draft_probs_top_k now",
        "speculation.min_confidence": "is draft.draft_model.min_confidence now",
        "speculation.alternatives": "is gone; drafts are trees wherever the target's attention supports them",
        "speculation.draft_ahead": "is gone; speculation.schedule: lock_step does not draft ahead",
    }
)
"""Keys of earlier releases, each with the end of its error message."""


def load_config(
    path: Path, overrides: Iterable[str] = (), environment: Mapping[str, str] | None = None
) -> SlipstreamConfig:
    """Reads a YAML file; SLIPSTREAM__SECTION__KEY variables and then `section.key=value` overrides take precedence.

    Relative paths of model folders and credential files are relative to the file. Raises ConfigError naming the key.
    """
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is no mapping; expected the sections model, target, draft, ...")
    for name, value in sorted((environment or {}).items()):
        if name.startswith(ENVIRONMENT_PREFIX):
            _override(data, name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"), value, name)
    apply_overrides(data, overrides)
    _expand_model_path(data, "model", "target", path.parent)
    _expand_model_path(data, "draft", "model", path.parent)
    if isinstance(trust := data.get("trust"), dict):
        for key in trust.keys() & {"certificates", "token_file"}:
            if isinstance(trust[key], str):
                trust[key] = str(path.parent / Path(trust[key]).expanduser())
    return validated(data)


def apply_overrides(data: dict[str, Any], overrides: Iterable[str]) -> None:
    """Sets each `section.key=value`, where the value is YAML. Raises ConfigError for a malformed override."""
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator:
            raise ConfigError(f"override '{override}' is not of the form section.key=value")
        _override(data, key.split("."), value, key)


def validated(data: Mapping[str, Any]) -> SlipstreamConfig:
    """Returns the config in `data`; raises ConfigError with one line per wrong key."""
    moved = [f"{key} {message}" for key, message in MOVED_KEYS.items() if _has(data, key)]
    if moved:
        raise ConfigError("wrong configuration\n  " + "\n  ".join(moved))
    try:
        return SlipstreamConfig.model_validate(data)
    except ValidationError as error:
        lines = error_lines(error, SlipstreamConfig, whole="config")
        raise ConfigError("wrong configuration\n  " + "\n  ".join(lines)) from error


def _has(data: Any, key: str) -> bool:
    """Returns True if `data` has a value at a dotted key."""
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
        raise ConfigError(f"{name}: '{value}' is not a YAML value: {error}") from error


def _expand_model_path(data: dict[str, Any], section: str, key: str, base: Path) -> None:
    """Makes local folders absolute; keeps any other value, as a Hugging Face id."""
    part = data.get(section)
    if not isinstance(part, dict) or not isinstance(part.get(key), str):
        return
    path = Path(part[key]).expanduser()
    if path.is_absolute() or part[key].startswith("."):
        part[key] = str(path if path.is_absolute() else (base / path).resolve())
    elif (base / path).is_dir():
        part[key] = str((base / path).resolve())
