"""The configuration: one frozen pydantic model, read from YAML and overridden by environment and command line.

Each part of the system receives only the sub-model that it needs.

Error messages for a file that holds a frozen model, one line per key: what was found, and what was expected.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from cluster.config_sections import (
    PROJECTING_HEADS,
    SECTIONS_TAKEN,
    STATE_READERS,
    TAKING_MODELS,
    ApiKey,
    DraftModelOptions,
    EagleOptions,
    HeadOptions,
    HybridOptions,
    KubernetesOptions,
    LayerSkipOptions,
    NgramOptions,
    Positive,
    StatesOptions,
    SuffixOptions,
    TracingConfig,
    TrustConfig,
    faults_of,
)
from cluster.errors import ConfigError
from protos.draft_tree import MAX_BLOCK_TOKENS


def error_lines(error: ValidationError, model: type[BaseModel], whole: str) -> list[str]:
    """Returns one line per error; `whole` stands for the file if no key is at fault."""
    return [f"{'.'.join(map(str, found['loc'])) or whole}: {_fault(found, model)}" for found in error.errors()]


def _fault(found: ErrorDetails, model: type[BaseModel]) -> str:
    if found["type"] != "extra_forbidden":
        return found["msg"]
    *sections, key = map(str, found["loc"])
    keys = _keys(sections, model)
    close = get_close_matches(key, keys, n=1)
    guess = f"did you mean {close[0]}? " if close else ""
    return f"there is no such key; {guess}expected one of {', '.join(keys)}"


def _keys(sections: list[str], model: type[BaseModel]) -> list[str]:
    """Returns the keys of a section, given the path of section names to it."""
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


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelConfig(_Frozen):
    """The model that is served."""

    target: str = Field(description="Hugging Face id or folder of the target model; ~ and relative paths are expanded")
    served_name: str | None = Field(None, description="name that clients use; default: the last part of target")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("bfloat16", description="of target and draft model")
    max_context: Positive = Field(2048, description="tokens a session may have, prompt included")

    @property
    def name(self) -> str:
        return self.served_name or Path(self.target).name


class Resources(_Frozen):
    """Resources that Ray reserves for one process that runs a model."""

    num_cpus: float = Field(1, ge=0, description="may be a fraction")
    num_gpus: float = Field(
        0,
        ge=0,
        description="a fraction shares a GPU: 0.25 puts four such processes on one, each with a quarter of its memory",
    )
    accelerator_type: str | None = Field(None, description="Ray accelerator type, for instance L4 or H100")
    custom: dict[str, float] = Field(default_factory=dict, description="custom Ray resources")
    labels: dict[str, str] = Field(default_factory=dict, description="Ray node labels that the node must carry")
    threads: Positive = Field(1, description="CPU threads of the model's process")
    cpu_affinity: tuple[int, ...] = Field(
        (), description="cores that the process may run on, and a target's coordinator; empty: any"
    )
    background: bool = Field(False, description="whether the model computes only while nobody else wants its cores")

    @model_validator(mode="after")
    def _whole_or_part(self) -> Self:
        if self.num_gpus > 1 and self.num_gpus % 1:
            raise ValueError(f"num_gpus is {self.num_gpus:g}, expected a whole number, or a part of one GPU")
        return self

    @property
    def gpu_share(self) -> float:
        """Share of its one GPU that the process may use."""
        return min(self.num_gpus, 1.0) or 1.0


class CacheConfig(_Frozen):
    """The paged cache of keys and values of one process that runs a model."""

    page_size: Positive = Field(16, description="positions of a page; whole pages are shared between sessions")
    gib: float | None = Field(
        None,
        gt=0,
        description="memory of the cache; default: room for max_sessions of max_context tokens, but no more than half"
        " of the memory that is free after loading, on a GPU nine tenths of it, or of what num_gpus leaves",
    )


class Replicas(_Frozen):
    """Bounds of a pool and rules for scaling between them; equal bounds fix its size."""

    min: Annotated[int, Field(ge=0)] = Field(1, description="replicas that are always there")
    max: Positive = Field(1, description="most replicas")
    sessions_per_replica: float | None = Field(
        None, gt=0, description="sessions that scaling aims at for each replica; default: half of max_sessions"
    )
    up_delay_s: float = Field(10, ge=0, description="how long more replicas must be needed before there are more")
    down_delay_s: float = Field(300, ge=0, description="how long fewer must be enough before there are fewer")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"max is {self.max}, expected at least min, which is {self.min}")
        return self


class TargetReplicas(Replicas):
    """Scaling of the target pool, which is never empty."""

    min: Positive = Field(1, description="replicas that are always there")
    first_token_s: Seconds = Field(
        2, description="time to first token beyond which prompts that wait for one another get more replicas"
    )


class DraftReplicas(Replicas):
    """Scaling of the draft pool.

    It may be empty; targets then decode without speculation until drafters are started.
    """

    min: Annotated[int, Field(ge=0)] = Field(
        1, description="replicas that are always there; 0: none while none is needed"
    )
    per_target: float | None = Field(
        None, gt=0, description="drafters for each target replica, whatever is asked of them; default: by need"
    )

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.per_target is not None and self.sessions_per_replica is not None:
            raise ValueError("per_target follows the target pool, sessions_per_replica the sessions; leave one out")
        return self


def _check_places(replicas: Replicas, max_sessions: int) -> None:
    """Raises ValueError if scaling aims at more sessions than a replica takes."""
    aim = replicas.sessions_per_replica
    if aim is not None and aim > max_sessions:
        raise ValueError(
            f"replicas.sessions_per_replica is {aim:g}, expected at most max_sessions, which is {max_sessions}"
        )


class TargetPool(_Frozen):
    """The pool of tensor-parallel target replicas."""

    engine: Literal["slipstream", "vllm", "mixed"] = Field(
        "slipstream",
        description="vllm: forwards, pages and prompts are vLLM's, an extra to install; drafts are chains then,"
        " and acceptance is coupled. mixed: every second replica is vLLM's, when it is deployed",
    )
    vllm: dict[str, Any] = Field(
        default_factory=dict, description="arguments of vLLM's own, by the names of its EngineArgs, as quantization"
    )
    tensor_parallel: Positive = Field(1, description="ranks of one replica")
    replicas: TargetReplicas = TargetReplicas()
    resources_per_rank: Resources = Resources()
    cache_per_rank: CacheConfig = CacheConfig()
    max_sessions: Positive = Field(16, description="sessions in a replica's cache at once; further ones queue")
    max_step_tokens: Positive = Field(512, description="most tokens of one forward; long prompts are fed in chunks")
    step_timeout_s: Seconds = Field(
        60,
        description="a step that takes longer ends the replica, as does one that takes thirty times as long as steps"
        " of its size were measured to, but not before ten seconds",
    )
    start_timeout_s: Seconds = Field(
        3600, description="a replica whose model is not loaded and measured by then is given up, and another is started"
    )
    drain_s: Seconds = Field(
        30, description="how long a replica that stops goes on with sessions that no other replica has room for"
    )

    @model_validator(mode="after")
    def _has_places(self) -> Self:
        _check_places(self.replicas, self.max_sessions)
        return self

    @model_validator(mode="after")
    def _knows_its_engine(self) -> Self:
        if self.engine == "slipstream" and self.vllm:
            raise ValueError("vllm has arguments, but engine is slipstream; set target.engine to vllm")
        if faults := faults_of(self.vllm):
            raise ValueError("; ".join(faults))
        if self.engine != "slipstream" and self.cache_per_rank.page_size != CacheConfig().page_size:
            raise ValueError("cache_per_rank.page_size is vllm.block_size where vLLM keeps the pages; leave it out")
        if self.engine != "slipstream" and not self.resources_per_rank.num_gpus and self.cache_per_rank.gib is None:
            raise ValueError(
                "cache_per_rank.gib is missing: vLLM would take nine tenths of a host's memory; say how much it may"
            )
        if self.engine == "mixed" and self.replicas.max < 2:
            raise ValueError("engine is mixed, but replicas.max is 1: a mixed pool has a replica of each engine")
        return self


def _refuse_earlier_method(value: Any) -> Any:
    """Raises ValueError with the current name for a method name of an earlier release."""
    if value in EARLIER_METHODS:
        raise ValueError(f"method {value} is named {EARLIER_METHODS[value]} now")
    return value


EARLIER_METHODS: Mapping[Any, str] = MappingProxyType({"prompt_lookup": "ngram", "lookup_first": "hybrid"})


class DraftPool(_Frozen):
    """The pool of drafters. A method's options are in the section of its name.

    `model` is not one of them: for every method, it is the checkpoint that drafters load. A draft model is checked
    against the target's vocabulary before anything starts, a head against its sizes when it is loaded.
    """

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
        description="hybrid looks continuations up in the text and asks the model in doubt; layer_skip drafts"
        " with some of the target's own layers; suffix looks the continuation up in recent answers too; medusa,"
        " mlp_speculator, dflash and eagle are published heads, which read the target's hidden states; mtp does too,"
        " and is the module that the target's own checkpoint comes with",
    )
    model: str | None = Field(None, description="Hugging Face id or folder of the draft model, if the method has one")
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
    replicas: DraftReplicas = DraftReplicas()
    resources: Resources = Resources()
    cache: CacheConfig = CacheConfig()
    max_sessions: Positive = Field(64, description="sessions one drafter serves at once")
    start_timeout_s: Seconds = Field(3600, description="as `target.start_timeout_s`")

    @property
    def model_method(self) -> str:
        """The method that drafts with `model` and may read the target's states: `method`, or the one that hybrid
        asks."""
        return self.hybrid.then if self.method == "hybrid" else self.method

    @model_validator(mode="after")
    def _complete(self) -> Self:
        taken = SECTIONS_TAKEN[self.method] | SECTIONS_TAKEN[self.model_method]
        if self.model_method not in TAKING_MODELS and self.model is not None:
            raise ValueError(f"method {self.method} takes no model; leave draft.model out")
        if self.model_method in TAKING_MODELS and self.model is None:
            raise ValueError(f"method {self.method} needs a model: a Hugging Face id or a folder")
        for section in sorted(set().union(*SECTIONS_TAKEN.values()) - taken):
            if getattr(self, section) != type(getattr(self, section))():
                raise ValueError(f"{section} has options, but method {self.method} has no use for them; leave them out")
        if self.states != StatesOptions() and self.model_method not in STATE_READERS:
            raise ValueError(f"states has options, but method {self.method} reads none of the target; leave them out")
        if self.states.project == "target" and self.model_method not in PROJECTING_HEADS:
            raise ValueError(
                f"states.project is target, but method {self.model_method} has no projection; leave it out"
            )
        if self.draft_model.quantization != "none" and self.resources.num_gpus:
            raise ValueError(f"draft_model.quantization {self.draft_model.quantization} is for CPUs; leave it out")
        options = getattr(self, self.model_method, None)
        if isinstance(options, HeadOptions) and options.quantization != "none" and self.resources.num_gpus:
            raise ValueError(f"{self.model_method}.quantization {options.quantization} is for CPUs; leave it out")
        _check_places(self.replicas, self.max_sessions)
        return self


def current_acceptance(value: Any) -> Any:
    """Returns the current name of an acceptance rule; `ratio` is an alias of rejection sampling."""
    return "rejection" if value == "ratio" else value


class SpeculationConfig(_Frozen):
    """Draft length, acceptance rule and schedule of speculation."""

    draft_tokens: int = Field(
        5, ge=0, le=MAX_BLOCK_TOKENS, description="largest draft length of a block; 0: no speculation"
    )
    acceptance: Annotated[Literal["coupled", "rejection"], BeforeValidator(current_acceptance)] = Field(
        "coupled",
        description="acceptance rule: Gumbel coupling, or rejection sampling (also spelled ratio); requests with a seed"
        " are always coupled",
    )
    schedule: Literal["adaptive", "lock_step"] = Field(
        "adaptive",
        description="adaptive: chooses draft lengths and waits by what they bring; lock_step: drafts draft_tokens for"
        " all sessions, then verifies all (the reference that adaptive is compared with)",
    )

    @property
    def is_lock_step(self) -> bool:
        return self.schedule == "lock_step"


class AuditConfig(_Frozen):
    """Audits of ended requests: a router has an idle target decide them again without speculation, and compares."""

    share: float = Field(0.0, ge=0, le=1, description="of the requests; 0: none")
    near_tie: float | None = Field(
        None, ge=0, description="margin in logits below which a difference is rounding; default: by model.dtype"
    )
    max_waiting: Positive = Field(64, description="requests that may wait for their audit; further ones are dropped")
    max_waiting_tokens: Positive = Field(1 << 18, description="tokens that they may have together, prompts included")
    records: str | None = Field(None, description="file that differences are appended to as JSON lines")
    max_record_bytes: Positive = Field(1 << 20, description="size at which nothing more is appended")


class AdminConfig(_Frozen):
    """A separate address for `/metrics` and the live page; the API is served there, too."""

    host: str = Field("127.0.0.1", description="address to listen on, of each machine with a router")
    port: int = Field(
        0, ge=0, le=65535, description="where set, `/metrics` and the live page are there and not at server.port"
    )


class ServerConfig(_Frozen):
    """The HTTP front and the router."""

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0: all of the machine's")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0: any free one")
    routers: Positive = Field(1, description="router replicas")
    max_body_bytes: Positive = Field(4 << 20, description="largest request body; a larger one gets 413")
    body_timeout_s: Seconds = Field(30, description="how long a request's body may take to come; then it gets 408")
    request_timeout_s: Seconds | None = Field(
        None,
        description="how long a whole request may take, its answer included; then it gets 408, or its stream an error"
        " and its end; empty: as long as its tokens take",
    )
    keep_alive_s: Positive = Field(60, description="how long a connection stays open between two requests")
    max_requests: Positive = Field(
        1024,
        description="sessions in flight per router, bodies that it reads at once, and requests that Serve's proxy holds"
        " back; more get 429",
    )
    max_request_sessions: Positive = Field(
        128, description="sessions that one request may have: its prompts, times n; more get 400"
    )
    generation_defaults: Literal["model", "none"] = Field(
        "model",
        description="where sampling parameters come from that a request leaves out: `model`: the checkpoint's"
        " generation_config.json, as far as it has them; `none`: OpenAI's defaults alone",
    )
    drain_s: Seconds = Field(30, description="how long running requests may finish when the server stops")
    stream_interval: Positive = Field(
        1,
        description="least tokens of one event of a stream, between the first and the last: more make streams less"
        " smooth and cost less, for every event passes through the router, Serve's proxy and the client",
    )
    target_wait_s: Seconds = Field(60, description="how long a request waits for a target replica before it fails")
    page: bool = Field(True, description="whether `/` shows what the pools are at, to whoever may ask")
    served_names: tuple[str, ...] = Field((), description="further names that clients may use for the model")
    cors_origins: tuple[str, ...] = Field(
        (), description="sites whose pages in a browser may ask; `*`: all; empty: none but pages of this address"
    )
    stream_keep_alive_s: Seconds = Field(
        15, description="a stream in which so long nothing came gets a comment, so that nobody takes it for dead"
    )
    keys: dict[str, ApiKey] = Field({}, description="API keys, by names of your choice; empty: nobody needs one")
    insecure: bool = Field(
        False, description="whether anybody who reaches an address beyond loopback may be served without a key"
    )
    allow_special_tokens_in_text: bool = Field(
        False, description="control tokens that are spelled in a chat's messages are taken as tokens, not as text"
    )
    response_template: Literal["auto", "none"] | dict[str, Any] = Field(
        "auto",
        description="how the target writes reasoning and tool calls, as a response template of transformers; auto: the"
        " checkpoint's own, or what transformers knows of its architecture; none: all of an answer is content",
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="what a line of a replica's log is; `json`: an object, in which each fact has a name"
    )
    admin: AdminConfig = AdminConfig()
    audit: AuditConfig = AuditConfig()


class SlipstreamConfig(_Frozen):
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
        """All names of the model; the first one is its own."""
        return tuple(dict.fromkeys((self.model.name, *self.server.served_names)))

    @model_validator(mode="after")
    def _engine_can(self) -> Self:
        """Rejects settings that a vLLM target cannot meet.

        Such a target decides by its own draws, and keeps hidden states beside its cache if the drafting method reads
        them.
        """
        if self.target.engine == "slipstream":
            return self
        if self.speculation.acceptance == "rejection":
            raise ValueError("speculation.acceptance is rejection, but a vLLM target only supports coupled")
        if self.draft.model_method in STATE_READERS and not self.draft.states.keep:
            raise ValueError(
                "draft.states.keep is false, a vLLM target keeps hidden states or sends none, for it cannot be told to"
                " compute them again: leave it out"
            )
        return self


MOVED: Mapping[str, str] = MappingProxyType(
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
        "speculation.alternatives": "is gone; blocks are trees wherever the target's attention takes them",
        "speculation.draft_ahead": "is gone; speculation.schedule: lock_step does not draft ahead",
    }
)
"""Keys of earlier releases, and their replacements."""


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
        raise ConfigError(f"{path} holds no mapping; expected the sections model, target, draft, ...")
    for name, value in sorted((environment or {}).items()):
        if name.startswith(ENVIRONMENT_PREFIX):
            _override(data, name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"), value, name)
    apply_overrides(data, overrides)
    _expand_model_path(data, "model", "target", path.parent)
    _expand_model_path(data, "draft", "model", path.parent)
    for key in ("certificates", "token_file"):
        _make_absolute(data, "trust", key, path.parent)
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
    moved = [f"{key} {fate}" for key, fate in MOVED.items() if _has(data, key)]
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
    """Makes local folders absolute; keeps anything that is not a folder, as a Hugging Face id."""
    part = data.get(section)
    if not isinstance(part, dict) or not isinstance(part.get(key), str):
        return
    path = Path(part[key]).expanduser()
    if path.is_absolute() or part[key].startswith("."):
        part[key] = str(path if path.is_absolute() else (base / path).resolve())
    elif (base / path).is_dir():
        part[key] = str((base / path).resolve())


def _make_absolute(data: dict[str, Any], section: str, key: str, base: Path) -> None:
    """Makes a value absolute that can only be a path."""
    part = data.get(section)
    if isinstance(part, dict) and isinstance(part.get(key), str):
        part[key] = str(base / Path(part[key]).expanduser())
