"""Checks a config against the checkpoints that it names, before anything starts."""

from pathlib import Path

from actors.methods.heads.head_files import PICKLES
from actors.models.checkpoint import check_draft, check_tensor_parallel, local_folder, vocabulary
from actors.models.config_reader import read_config
from actors.models.layer_subset import check_layers
from actors.models.positions import context_length, uses_rope
from cluster.config import SlipstreamConfig
from cluster.draft_options import HEADS
from cluster.errors import ModelError


def check_models(config: SlipstreamConfig, *, with_weights: bool) -> None:
    """Raises ModelError when the models cannot serve as configured; fetches Hugging Face ids, weights if asked."""
    check_draft_model(config, check_target_model(config, with_weights=with_weights), with_weights=with_weights)


def check_target_model(config: SlipstreamConfig, *, with_weights: bool) -> Path:
    """The same of the target alone, as a node needs it that no drafter runs on; returns its folder."""
    target = local_folder(config.model.target, with_weights=with_weights)
    context = context_length(read_config(target))
    if context is not None and config.model.max_context > context:
        raise ModelError(
            f"model.max_context is {config.model.max_context}, but {target} reads {context} tokens at most; lower"
            " model.max_context, or extend the model with a RoPE scaling in its config.json"
        )
    check_tensor_parallel(target, config.target.tensor_parallel)
    return target


def check_draft_model(config: SlipstreamConfig, target: Path, *, with_weights: bool) -> None:
    """The same of what drafts for a target in a folder."""
    if config.draft.method == "layer_skip":
        check_layers(target, config.draft.layer_skip.ids)
    if config.draft.model is None:
        return
    if config.draft.model_method in HEADS:  # it is checked when it is loaded: only its tensors tell what it is
        local_folder(config.draft.model, with_weights=with_weights, more=PICKLES)
    else:
        draft = local_folder(config.draft.model, with_weights=with_weights)
        check_draft(vocabulary(target), draft)
        check_draft_positions(draft, config.model.max_context)


def check_draft_positions(draft: Path, max_context: int) -> None:
    """Raises ModelError for a draft whose table of positions is shorter than the longest session.

    A draft with rotary positions drafts up to its own length; longer sessions go on without it.
    """
    config = read_config(draft)
    context = context_length(config)
    if context is not None and context < max_context and not uses_rope(config):
        raise ModelError(
            f"draft {draft} has {context} learned positions, but model.max_context is {max_context}; lower"
            " model.max_context, or use a draft model with as many positions"
        )
