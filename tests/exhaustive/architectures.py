"""Checks Slipstream against small models of every causal language model in the installed transformers.

python -m tests.exhaustive.architectures [NAME ...]   tries these (default: all) and prints a line for each
python -m tests.exhaustive.architectures --table      tries all and writes the tables in docs/models.md
python -m tests.exhaustive.architectures NAME --table writes these into the tables and keeps all other rows
"""

import copy
import logging
import re
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from actors.attention.batch import exact_batch
from actors.attention.padded import PaddedSdpa
from actors.attention.sdpa_gather import SdpaGather
from actors.attention.select_backend import attention_shape
from actors.compute.capture import CallCapture
from actors.compute.collectives import ThreadGroup
from actors.compute.kv_cache import InputRow, PagedCache
from actors.engine.runner import ModelRunner
from actors.engine.static_step import Buckets, Recording
from actors.models.checkpoint import check_tensor_parallel, load_model
from actors.models.config_reader import is_recurrent
from actors.models.decoder import Decoder, LlamaDecoder, decoder_for
from actors.models.recurrent_layers import recurrent_layers
from actors.models.reference_check import check_model
from actors.models.sharding import shard
from cluster.errors import ModelError
from cluster.page_allocator import SlotMove
from tests.unit.trees import grown

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEADING = "## Architectures"
VLLM_CLASSES = Path(__file__).with_name("vllm_classes.txt")
VOCABULARY = 128
FIRST_TOKEN = 4
PAGE_SIZE = 4
PAGES_EACH = 30
STEPS = 16
LAYERS = 4
MAX_PARAMETERS = 30_000_000
TOLERANCE = 2e-4  # relative to the largest logit

SIZES: dict[str, Any] = {  # by config field
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "num_decoder_layers", "num_encoder_layers", "num_layers_per_stack"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "emb_dim", "embedding_dim"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim"), 80),
    **dict.fromkeys(("encoder_ffn_dim", "dff", "dim_ff", "intermediate_size_mlp", "dense_intermediate_size"), 80),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("head_dim", "swa_head_dim", "dim_head", "kv_channels"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_target_positions"), 256),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size", "attention_window_size"), 7),
    **dict.fromkeys(("attention_chunk_size", "floor_scale", "keep_window_size", "local_attention"), 7),
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "rotary_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "zero_expert_num": 1,
    "moe_layer_end_index": LAYERS - 1,
    "dim_model_base": 64,
    "tie_word_embeddings": False,
    "use_mamba_kernels": False,
    "attn_layers": ["local", "lsh"],
}
LATENT = {"num_key_value_heads": 4, "head_dim": 8}  # latent attention expands keys for every head
SPECIAL: dict[str, dict[str, Any]] = {  # overrides by architecture
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "axk1", "youtu", "glm4_moe_lite", "minicpm3"), LATENT),
    **dict.fromkeys(("axk2", "bailing_hybrid", "kimi_linear", "deepseek_v32", "glm_moe_dsa"), LATENT),
    **dict.fromkeys(("dots3_note", "dots3_note_text"), LATENT),
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "gemma4_unified_assistant": {"num_kv_shared_layers": 0},
    "longcat_flash": LATENT | {"num_hidden_layers": 2 * LAYERS},
    "falcon": {"head_dim": None, "num_kv_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "gpt_bigcode": {"num_key_value_heads": None},
    "jetmoe": {"num_attention_heads": None},
    "mpt": {"num_hidden_layers": None, "hidden_size": None},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128},
    "lfm2": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2), "use_expert_bias": True},
    "nemotron_h": {"n_groups": 1, "mamba_num_heads": 8, "mamba_head_dim": 16},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 5e5,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [4.0 + i for i in range(8)],
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "rope_theta": 1e4,
}
BY_TURNS = ["sliding_attention", "full_attention"] * (LAYERS // 2)
WINDOWS = {"use_sliding_window": True, "layer_types": BY_TURNS}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon, alibi": ("falcon", {"alibi": True}),
    "falcon, all heads": ("falcon", {"multi_query": False}),
    "falcon, new architecture": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, not parallel": ("falcon", {"parallel_attn": False}),
    "gpt_bigcode, all heads": ("gpt_bigcode", {"multi_query": False}),
    "phimoe, no window": ("phimoe", {"sliding_window": None}),
    "qwen2_moe, windows": ("qwen2_moe", WINDOWS),
    "qwen2, windows": ("qwen2", WINDOWS),
    "qwen3, windows": ("qwen3", WINDOWS),
    "qwen3_moe, windows": ("qwen3_moe", WINDOWS),
    "ministral, by turns": ("ministral", {"layer_types": BY_TURNS}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "cohere, norms": ("cohere", {"use_qk_norm": True}),
    "stablelm, norms": ("stablelm", {"qk_layernorm": True}),
    "phi, norms": ("phi", {"qk_layernorm": True}),
    "gpt_neox, not parallel": ("gpt_neox", {"use_parallel_residual": False}),
    "opt, norms after": ("opt", {"do_layer_norm_before": False}),
    "opt, small embedding": ("opt", {"word_embed_proj_dim": 32}),
    "llama4_text, full attention": ("llama4_text", {"layer_types": ["full_attention"] * LAYERS}),
    "deepseek_v3, values as wide as keys": ("deepseek_v3", {"v_head_dim": 24}),
    "deepseek_v2, no latent queries": ("deepseek_v2", {"q_lora_rank": None}),
    "gemma2, no soft cap": ("gemma2", {"attn_logit_softcapping": None}),
    "llama, one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama, all kv heads": ("llama", {"num_key_value_heads": 4}),
    "llama, wide heads": ("llama", {"head_dim": 32}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, gelu": ("llama", {"hidden_act": "gelu"}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama, dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama, longrope": ("llama", {"rope_parameters": LONGROPE}),
    "phi3, longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 256}),
    "qwen3, yarn": ("qwen3", {"rope_parameters": YARN}),
    "gemma3_text, linear": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
}
REASONS = (  # pattern in a reason, words in the table
    (r"layers that are not supported \((.+?)\)", r"\1 layers"),
    (r"layers that differ in (\w+)", r"layers differ in \1"),
    (r"needs (.+?) \(", r"\1"),
    (r"layers attend, but its config has", "cross-attention: more layers attend than the config has"),
    (r"attends 0 times a step", "does not attend through the paged cache"),
    (r"attends (\d+) times a step", r"attends \1 times per layer"),
    (r"logits differ", "logits differ from transformers'"),
    (r"no attention heads", "no attention heads"),
    (r"limits time steps", "limits time steps only in prompts"),
    (r"caches \d+ key-value heads", "caches other sizes than its config gives"),
    (r"its small test model fails", "its small test model fails"),
    (r"sliding window by its config", "ignores its sliding window"),
    (r"parameters are too many", "too large"),
    (r"^(\w+): ", r"\1"),
)
HEADERS = frozenset({"architectures", "result", "---"})  # first cells of lines without outcomes
EXPLANATION = """\
`lean` is leaner code for Llama-like models, `transformers` the model's own code. Ranks may be any divisor
of the heads and widths. The last columns show whether draft heads can read the model's states, and whether vLLM 0.32.0
lists its class."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {}) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
} | VARIANTS


class Support(NamedTuple):
    """Cells of an exact architecture in docs/models.md."""

    engine: str
    ranks: str
    trees: str
    heads: str
    vllm: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a case: exact, refused or not built; different and failed are bugs."""

    kind: str
    reason: str = ""
    support: Support | None = None  # None unless exact


@dataclass(slots=True)
class Session:
    """Text to feed in pieces, with its cache pages."""

    text: tuple[int, ...]
    pages: tuple[int, ...]
    cached: int = 0  # cached tokens, a prefix of the text
    rows: list[InputRow] = field(default_factory=list)

    def place(self, at: int) -> int:
        return self.pages[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE


def try_architecture(name: str) -> Outcome:
    """Saves a small random model, loads and runs it like the engine, and compares its logits with transformers.

    Also runs padded steps if the model can be captured on a GPU.
    """
    model_type, fields = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.manual_seed(0)
            made = random_model(small_config(model_type, fields))
            made.save_pretrained(folder)
            plain = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="sdpa" if fields.get("alibi") else "eager"
            ).eval()
            plain.load_state_dict(made.state_dict())  # transformers zeroes a stored padding row of youtu
            logits_of(plain, tuple(range(FIRST_TOKEN, 60)))
        except Exception as error:  # noqa: BLE001 - configs refuse in their own ways
            return Outcome("not built", one_line(error))
        try:
            model = load_model(Path(folder), "float32", torch.device("cpu")).eval()
            can_split = splits_layers(model, Path(folder))
            decoder = decoder_for(model)
            runners = [ModelRunner(model, 2 * PAGES_EACH, PAGE_SIZE, decoder=decoder)]
            if attention_shape(model, PAGE_SIZE).plain and not decoder.capture_fault((1, 64)):
                recording = Recording(Buckets((4, 8, 16), 2, PAGES_EACH), CallCapture())
                runners.append(
                    ModelRunner(
                        model,
                        2 * PAGES_EACH,
                        PAGE_SIZE,
                        PaddedSdpa(),
                        decoder,
                        is_checked=True,
                        recording=recording,
                    )
                )
        except ModelError as error:
            return Outcome("refused", str(error).replace(folder, "the checkpoint"))
        except Exception as error:  # noqa: BLE001 - anything but a ModelError is a finding
            return Outcome("failed", one_line(error))
        try:
            worst = max(furthest(runner, plain, is_recurrent=bool(recurrent_layers(plain))) for runner in runners)
        except Exception as error:  # noqa: BLE001 - anything but a ModelError is a finding
            return Outcome("failed", one_line(error))
    if not worst < TOLERANCE:
        return Outcome("different", f"{worst:.2g} of the largest logit")
    support = Support(
        engine="lean" if isinstance(decoder, LlamaDecoder) else "transformers",
        ranks="any divisor" if can_split else "1",
        trees=yes_or_no(not is_recurrent(model.config)),
        heads=yes_or_no(exposes_states(decoder, plain)),
        vllm=yes_or_no(type(plain).__name__ in vllm_classes()),
    )
    return Outcome("exact", support=support)


def yes_or_no(condition: bool) -> str:
    return "yes" if condition else "no"


def splits_layers(model: PreTrainedModel, folder: Path) -> bool:
    """Returns whether two ranks are exact and share the work of layers, rather than only that of the LM head."""
    try:
        check_tensor_parallel(folder, 2)
        check_model(folder, ranks=2)
    except ModelError:
        return False
    cuts = shard(copy.deepcopy(model), ThreadGroup.of_size(2)[0])
    return any(re.search(r"\.\d+\.", name) for name in cuts)


@torch.inference_mode()
def exposes_states(decoder: Decoder, plain: PreTrainedModel) -> bool:
    """Returns whether a decoder returns transformers' hidden states, as read by heads: inside and after the layers."""
    text = tuple(range(FIRST_TOKEN, 60))
    config = plain.config.get_text_config()
    layers = (config.num_hidden_layers // 2, config.num_hidden_layers)
    sizes = attention_shape(plain, PAGE_SIZE).sizes
    cache = PagedCache(PAGES_EACH, PAGE_SIZE, sizes, torch.float32, torch.device("cpu"))
    batch = exact_batch([InputRow(text, 0, 1, tuple(range(PAGES_EACH)))], cache, SdpaGather())
    try:
        found = decoder(batch, layers).streams
        states = plain(torch.tensor([text]), use_cache=False, output_hidden_states=True).hidden_states
        right = torch.cat([states[layer][0] for layer in layers], dim=-1)
    except Exception:  # noqa: BLE001 - models without these states fail in their own ways
        return False
    if found is None or not found.shape == right.shape == (len(text), len(layers) * config.hidden_size):
        return False
    return float((found - right).abs().max() / right.abs().max()) < TOLERANCE


def vllm_classes() -> set[str]:
    """Returns the classes of transformers' causal language models that are in vLLM's registry of models."""
    return {line for line in VLLM_CLASSES.read_text().splitlines() if not line.startswith("#")}


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"


def small_config(model_type: str, fields: Mapping[str, Any]) -> PretrainedConfig:
    kind = CONFIG_MAPPING[model_type]
    special = SPECIAL.get(model_type, {})
    try:
        known = kind().to_dict()
    except Exception:  # noqa: BLE001 - not every config has defaults that it accepts
        known = dict.fromkeys(kind.__annotations__)
    chosen = small_fields(known) | special | dict(fields)
    return kind(**{name: value for name, value in chosen.items() if not (name in special and value is None)})


def small_fields(known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the SIZES for the fields of a config and its parts, with alternating layer kinds."""
    fields = {name: size for name, size in SIZES.items() if name in known and known[name] != []}
    for name in ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types"):
        if isinstance(known.get(name), list):
            kinds = list(dict.fromkeys(known[name]))
            fields[name] = [kinds[layer % len(kinds)] for layer in range(LAYERS)]
    parts = {name: part for name, part in known.items() if isinstance(part, dict) and "model_type" in part}
    return fields | {name: small_fields(part) | {"model_type": part["model_type"]} for name, part in parts.items()}


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    """Returns a model with random weights, including norms and biases, which are constant at initialization."""
    with torch.device("meta"):
        count = AutoModelForCausalLM.from_config(config, dtype=torch.float32).num_parameters()
    if count > MAX_PARAMETERS:
        raise ValueError(f"{count} parameters are too many")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for weight in model.parameters():
        noise = torch.randn_like(weight)
        weight.data = weight.data + 0.1 * noise if weight.ndim < 2 else noise / weight.shape[-1] ** 0.5
    return model


@torch.inference_mode()
def logits_of(model: PreTrainedModel, text: tuple[int, ...]) -> Tensor:
    return model(input_ids=torch.tensor([text]), use_cache=False).logits[0, :, :VOCABULARY]


def furthest(runner: ModelRunner, plain: PreTrainedModel, is_recurrent: bool) -> float:
    """Feeds two sessions in random order; returns the largest relative error of any logit."""
    rng = Random(1)
    sessions = [
        Session(tuple(rng.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(length)), pages)
        for length, pages in (
            (70, tuple(range(PAGES_EACH))),
            (110, tuple(range(2 * PAGES_EACH - 1, PAGES_EACH - 1, -1))),
        )
    ]
    worst = 0.0
    for _ in range(STEPS):
        rows, expected, moves = [], [], []
        for row, wanted, kept in [a_row(rng, session, plain, is_recurrent) for session in sessions]:
            rows.append(row)
            expected.append(wanted)
            moves += kept
        found = runner.forward(rows).logits[:, :VOCABULARY].clone()  # the next forward may overwrite it
        runner.forward([InputRow((FIRST_TOKEN,), 0, 1, (sessions[0].pages[-1],))], moves=moves)  # a third session
        right = torch.cat(expected)
        worst = max(worst, float((found - right).abs().max() / right.abs().max()))
    return worst


def a_row(
    rng: Random, session: Session, plain: PreTrainedModel, is_recurrent: bool
) -> tuple[InputRow, Tensor, list[SlotMove]]:
    """Draws a prompt chunk, a token, a partially accepted block or a tree. Recurrent models support no trees.

    Also returns the expected logits and the cache moves after acceptance.
    """
    start, text = session.cached, session.text
    left = len(text) - start
    kinds = ("part", "token", "block", "block", *(() if is_recurrent else ("tree",)))
    kind = rng.choice(kinds) if start else "part"
    if left < 8:  # roll back, which recurrent models can only to the beginning, and continue from there
        session.cached = start = 0 if is_recurrent else max(1, start - rng.randrange(1, 20))
    if kind == "tree":
        tree = grown(rng, 6, VOCABULARY)
        tree_at = start + 1
        row = InputRow((text[start], *tree.tokens), start, 1 + len(tree), session.pages, tree.parents)
        paths = [tuple(tree.tokens[node] for node in path) for path in tree.paths]
        wanted = torch.cat([logits_of(plain, text[:tree_at] + path)[-1:] for path in ((), *paths)])
        chosen = rng.choice(tree.paths)
        session.text = text[:tree_at] + tuple(tree.tokens[node] for node in chosen) + text[tree_at + len(chosen) :]
        session.cached = tree_at + len(chosen)
        places = [session.place(tree_at + step) for step in range(len(tree))]
        return row, wanted, [SlotMove(places[node], places[i]) for i, node in enumerate(chosen) if node != i]
    length = {"part": rng.randrange(3, 8), "token": 1, "block": rng.randrange(2, 7)}[kind]
    right = rng.randrange(length + 1) if kind == "block" else length
    wrong = tuple(rng.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(length - right))
    fed = text[start : start + right] + wrong
    session.cached = start + right
    logits = length if kind == "block" else 1
    return InputRow(fed, start, logits, session.pages), logits_of(plain, text[:start] + fed)[-logits:], []


def table(outcomes: Mapping[str, Outcome]) -> str:
    """Returns the section of docs/models.md, with a row for equal support and one for each other result and reason."""
    counts = Counter(outcome.kind for outcome in outcomes.values())
    tried = f"{counts['exact']} exact, {counts['refused']} refused, {counts['not built']} not built by the sweep"
    exact: dict[Support, list[str]] = defaultdict(list)
    others: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, outcome in sorted(outcomes.items()):
        base, _, variant = name.partition(", ")
        names = exact[outcome.support] if outcome.support else others[outcome.kind, outcome.reason]
        names.append(f"{base} ({variant})" if variant else base)
    kinds = ("exact", "refused", "not built", "different", "failed")
    return "\n".join(
        [
            HEADING,
            "",
            f"Results of `make model-table` with transformers {transformers.__version__}: {tried}.",
            "",
            EXPLANATION,
            "",
            "| architectures | own engine | ranks | trees | heads | vLLM |",
            "| --- | --- | --- | --- | --- | --- |",
            *(f"| {', '.join(names)} | {' | '.join(support)} |" for support, names in sorted(exact.items())),
            "",
            "| result | reason | architectures |",
            "| --- | --- | --- |",
            *(
                f"| {kind} | {reason} | {', '.join(names)} |"
                for (kind, reason), names in sorted(others.items(), key=lambda group: (kinds.index(group[0][0]), group))
            ),
            "",
        ]
    )


def brief(reason: str) -> str:
    """Returns a reason in the words of REASONS, or the reason itself if none matches."""
    found = (match.expand(words) for pattern, words in REASONS if (match := re.search(pattern, reason)))
    return next(found, reason.replace("|", "/"))


def written_outcomes() -> dict[str, Outcome]:
    """Returns the outcomes in docs/models.md by case."""
    outcomes = {}
    lines = [line for line in PAGE.read_text().partition(HEADING)[2].splitlines() if line.startswith("| ")]
    for cells in [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]:
        if cells[0] in HEADERS:
            continue
        if len(cells) == 3:
            kind, reason, names = cells
            outcome = Outcome(kind, reason)
        else:
            names, *support = cells
            outcome = Outcome("exact", support=Support(*support))
        for name in names.split(", "):
            outcomes[name.replace(" (", ", ").removesuffix(")")] = outcome
    return outcomes


def outcomes_of(names: list[str]) -> Iterator[tuple[str, Outcome]]:
    for name in names:
        outcome = try_architecture(name)
        print(f"{name:36} {outcome.kind:10} {outcome.reason}{', '.join(outcome.support or ())}", flush=True)
        yield name, outcome


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    transformers.logging.disable_progress_bar()
    names = [name for name in sys.argv[1:] if name != "--table"]
    outcomes = dict(outcomes_of(names or list(CASES)))
    print(dict(Counter(outcome.kind for outcome in outcomes.values())))
    if "--table" in sys.argv:
        tried = {name: replace(one, reason=brief(one.reason)) for name, one in outcomes.items()}
        outcomes = (written_outcomes() if names else {}) | tried
        PAGE.write_text(PAGE.read_text().partition(HEADING)[0].rstrip() + "\n\n" + table(outcomes))


if __name__ == "__main__":
    main()
