"""Checks a config against the checkpoints that it names, before anything starts."""

from pathlib import Path

from transformers import AutoConfig

from actors.methods.heads.head_files import PICKLES
from actors.models.checkpoint import check_draft, check_tensor_parallel, local_folder, vocabulary
from actors.models.layer_subset import check_layers
from cluster.config import SlipstreamConfig
from cluster.draft_options import HEADS
from cluster.errors import ModelError


def check_models(config: SlipstreamConfig, *, with_weights: bool) -> None:
    """Raises ModelError when the models cannot serve as configured; fetches Hugging Face ids, weights if asked."""
    check_draft_model(config, check_target_model(config, with_weights=with_weights), with_weights=with_weights)


def check_target_model(config: SlipstreamConfig, *, with_weights: bool) -> Path:
    """The same of the target alone, as a node needs it that no drafter runs on; returns its folder."""
    target = local_folder(config.model.target, with_weights=with_weights)
    positions = getattr(AutoConfig.from_pretrained(target).get_text_config(), "max_position_embeddings", None)
    if positions is not None and config.model.max_context > positions:
        raise ModelError(f"model.max_context is {config.model.max_context}, but {target} has {positions} positions")
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
        check_draft(vocabulary(target), local_folder(config.draft.model, with_weights=with_weights))
