"""Checks a configuration against its checkpoints before anything starts.

`config check --models`, `serve`, `up` and each node use it. It reads files and configurations and builds a model
without weights. Replicas perform the checks that need weights.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import PretrainedConfig

from actors.drafters.heads.files import PICKLES
from actors.drafters.registry import check_head, check_shared_vocabulary, states_needed
from actors.drafters.translation.pairing import Pairing, describe, pool_pairing
from actors.models.checkpoint import (
    check_files,
    check_tensor_parallel,
    checkpoint_fingerprint,
    empty_model,
    extra_tokens,
    local_folder,
    vocabulary,
    vocabulary_fingerprint,
)
from actors.models.config_reader import CONFIG, check_rope_sections, is_recurrent, read_config, read_json
from actors.models.decoder import is_llama_kind
from actors.models.layer_subset import check_layers, context_length, uses_rope
from actors.models.reference_check import check_model
from actors.models.tokenizer_reader import end_of_text, load_tokenizer
from cluster.config import SlipstreamConfig
from cluster.config_sections import HEADS
from cluster.errors import ModelError
from serve_app.api.chat_template import templates_of
from serve_app.api.draft_prompt import check_template

ADAPTER_CONFIG = "adapter_config.json"
PAIR = "pair: "  # begins the line that describes how the draft's tokens become the target's


def check_models(config: SlipstreamConfig, *, with_weights: bool, with_draft: bool = True) -> list[str]:
    """Checks target and draft, and returns their descriptions.

    Downloads models named by Hugging Face ids, without weights unless `with_weights`; always checks weights in local
    folders. Without `with_draft`, checks only the requirements of a node without drafters. Raises ModelError if the
    models cannot serve as configured.
    """
    if config.models:
        return _check_each(config, with_weights=with_weights, with_draft=with_draft)
    return _check_model(config, None, with_weights=with_weights, with_draft=with_draft)


def _check_model(
    config: SlipstreamConfig, pairing: Pairing | None, *, with_weights: bool, with_draft: bool
) -> list[str]:
    """Checks one model; `pairing` is its draft pool's if several models share it."""
    target = check_target_model(config, with_weights=with_weights)
    tokens = check_target_files(config, target, with_weights=with_weights)
    lines = [target_line(config, target, tokens), str(end_of_text(target))]
    if warning := extra_tokens(target):
        lines.append(f"warning: {warning}")
    if with_draft:
        pairing = check_draft_model(config, target, pairing, with_weights=with_weights)
        lines += draft_lines(config, target, pairing)
    return lines


def _check_each(config: SlipstreamConfig, **options: bool) -> list[str]:
    """Checks several models one by one, and prefixes their descriptions with their names."""
    lines = []
    pairings = {name: _check_pool(models) for name, models in config.pools.items()} if options["with_draft"] else {}
    for one in config.served:
        try:
            lines += [f"{one.name}: {line}" for line in _check_model(one.config, pairings.get(one.drafter), **options)]
        except ModelError as error:
            raise ModelError(f"{one.name}: {error}") from error
    return lines


def _check_pool(models: Sequence[SlipstreamConfig]) -> Pairing | None:
    """Returns the pairing of a pool's draft model with all its targets, or None without a draft model.

    Raises ModelError if the models cannot share their draft pool.
    """
    draft = models[0].draft
    tokens = {one.model.name: vocabulary(local_folder(one.model.target, with_weights=False)) for one in models}
    check_shared_vocabulary(draft, {name: vocabulary_fingerprint(one) for name, one in tokens.items()})
    if draft.model_method != "draft_model":
        return None
    pairing = pool_pairing(draft, tokens.values(), with_weights=False)
    refused = [one.model.name for one in models if one.speculation.acceptance == "rejection"]
    if refused and pairing.is_translated:
        raise ModelError(
            f"speculation.acceptance of {' and '.join(refused)} is rejection, but the draft has another tokenizer"
            " than some of its targets; set it to coupled, or use a draft pool in drafts"
        )
    return pairing


def check_target_model(config: SlipstreamConfig, *, with_weights: bool) -> Path:
    """Checks the target's config.json: model class, context length, tensor parallelism. Returns the target's folder."""
    target = local_folder(config.model.target, with_weights=with_weights)
    model = read_target_config(config, target)
    if model is None:
        return target
    context = context_length(model)
    if context is not None and config.model.max_context > context:
        raise ModelError(
            f"model.max_context is {config.model.max_context}, but {target} reads at most {context} tokens; lower"
            " model.max_context, or extend rope_parameters in its config.json with a RoPE scaling"
        )
    if config.target.engine != "vllm":
        check_tensor_parallel(target, config.target.tensor_parallel)
        check_model(target, ranks=config.target.tensor_parallel, max_context=config.model.max_context)
    return target


def read_target_config(config: SlipstreamConfig, target: Path) -> PretrainedConfig | None:
    """Reads the target's config.json. Returns None for an architecture that only vLLM implements."""
    if config.target.engine != "vllm":
        return read_config(target)
    check_rope_sections(target, read_json(target / CONFIG))  # vLLM reads the configuration with transformers, too
    try:
        return read_config(target)
    except ModelError:
        return None


def check_target_files(config: SlipstreamConfig, target: Path, *, with_weights: bool) -> Mapping[int, str]:
    """Checks the target's other files: tokenizer, chat templates, end of text, tensors. Returns token texts by id."""
    is_whole = has_weights(config.model.target, with_weights)
    if config.target.engine != "vllm":
        check_files(target, is_whole)
    elif is_whole:
        checkpoint_fingerprint(target)  # does not check shapes, because vLLM quantizes and fuses weights itself
    for name, adapter in config.target.adapters.items():
        folder = Path(adapter).expanduser()
        if folder.is_dir() and not (folder / ADAPTER_CONFIG).is_file():
            raise ModelError(f"adapter {name}: {folder} has no {ADAPTER_CONFIG}; correct target.adapters.{name}")
    templates_of(load_tokenizer(target))
    return vocabulary(target)


def check_draft_model(
    config: SlipstreamConfig, target: Path, pairing: Pairing | None, *, with_weights: bool
) -> Pairing | None:
    """Checks the draft's checkpoint against the target's folder; returns a draft model's pairing.

    `pairing` is the draft pool's if several models share it.
    """
    draft = config.draft
    model = read_target_config(config, target)
    if model is not None and is_recurrent(model):
        check_draft_of_recurrent(config, target)
    if draft.method == "layer_skip":
        check_layers(target, draft.layer_skip.ids)
    if draft.model is None:
        return None
    if draft.model_method in HEADS:
        local_folder(draft.model, with_weights=with_weights, more=PICKLES)
        if has_weights(draft.model, with_weights):
            states_needed(draft, target)
            if has_weights(config.model.target, with_weights):  # the head may borrow tensors of the target
                check_head(draft, target, vocabulary(target).keys())
        return None
    folder = local_folder(draft.model, with_weights=with_weights)
    pairing = pairing or pool_pairing(draft, [vocabulary(target)], with_weights=False)
    check_pairing(config, pairing)
    longest = check_draft_positions(folder, config.model.max_context)
    check_files(folder, has_weights(draft.model, with_weights))
    check_model(folder, max_context=longest)
    return pairing


def check_pairing(config: SlipstreamConfig, pairing: Pairing) -> None:
    """Raises ModelError for settings that the draft's tokenizer does not support."""
    if pairing.tokenizer is None:
        return
    if config.draft.prompt == "template":
        check_template(pairing.tokenizer)
    if config.speculation.acceptance == "rejection":
        raise ModelError(
            f"speculation.acceptance is rejection, but the draft {pairing.draft} has another tokenizer than the target,"
            " so the target's tokens have no draft probabilities; set speculation.acceptance to coupled"
        )
    if config.draft.learning is not None:
        raise ModelError(
            f"draft.learning trains on the target's tokens, but the draft {pairing.draft} has another tokenizer; remove"
            " draft.learning"
        )


def check_draft_of_recurrent(config: SlipstreamConfig, target: Path) -> None:
    """Raises ModelError for a draft that requires rolling back the target's recurrent layers."""
    draft = config.draft
    if draft.method == "layer_skip":
        raise ModelError(
            f"draft.method is layer_skip, but {target} has recurrent layers, which cannot take back rejected drafts;"
            " use another draft.method"
        )
    if draft.model_method in HEADS and not draft.states.keep:
        raise ModelError(
            f"draft.states.keep is false, but {target} has recurrent layers, which cannot compute hidden states of"
            " earlier tokens again; remove draft.states.keep"
        )


def check_draft_positions(draft: Path, max_context: int) -> int:
    """Returns the maximum number of session tokens that the draft reads.

    Drafts with rotary positions serve sessions up to their context length; longer sessions continue without drafts.
    Raises ModelError if a table of learned positions is shorter than the longest session.
    """
    config = read_config(draft)
    context = context_length(config)
    if context is not None and context < max_context and not uses_rope(config):
        raise ModelError(
            f"draft {draft} has {context} learned positions, but model.max_context is {max_context}; lower"
            " model.max_context, or use a draft model with as many positions"
        )
    return max_context if context is None else min(context, max_context)


def has_weights(name: str, with_weights: bool) -> bool:
    """Returns whether the weights are available for checks: downloaded, or in a local folder."""
    return with_weights or Path(name).expanduser().is_dir()


# ---------------------------------------------------------------- report


def target_line(config: SlipstreamConfig, target: Path, tokens: Mapping[int, str]) -> str:
    """Describes the target: class, engine, context and vocabulary."""
    model = read_target_config(config, target)
    if model is None:
        return f"target: {read_json(target / CONFIG).get('model_type')}, left to vLLM; {len(tokens)} tokens"
    by = "vLLM" if config.target.engine == "vllm" else engine_path(target, model)
    rows = int(model.get_text_config().vocab_size)
    return f"target: {_described(model, target)} by {by}, {len(tokens)} tokens in {rows} rows"


def draft_lines(config: SlipstreamConfig, target: Path, pairing: Pairing | None) -> list[str]:
    """Describes the draft: method, model, and the context length if it is shorter than the target's."""
    draft = config.draft
    if draft.model is None:
        return [f"draft: {draft.method}, without a model of its own"]
    folder = local_folder(draft.model, with_weights=False)
    if draft.model_method in HEADS:
        return [f"draft: {draft.method}, head in {folder}"]
    model = read_config(folder)
    lines = [f"draft: {draft.method}, {_described(model, folder)} by {engine_path(folder, model)}"]
    assert pairing is not None, "a draft model is paired"
    prompts = "; chats are drafted from the draft's own chat template" if draft.prompt == "template" else ""
    lines.append(f"{PAIR}{describe(pairing, target)}{prompts}")
    context = context_length(model)
    if context is not None and context < config.model.max_context:
        lines.append(f"draft: none for sessions of more than {context} tokens")
    return lines


def engine_path(folder: Path, model: PretrainedConfig) -> str:
    """Returns the name of the implementation that computes a model."""
    return "the lean decoder" if is_llama_kind(empty_model(folder, model, "float32")) else "transformers' layers"


def _described(model: PretrainedConfig, folder: Path) -> str:
    context = context_length(model)
    limit = "any context" if context is None else f"context {context}"
    kind = (getattr(model, "architectures", None) or [model.model_type])[0]
    return f"{kind} in {folder}, {limit}"
