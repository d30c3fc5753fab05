"""The list of vLLM's models in docs/models.md equals its registry."""

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm import ModelRegistry

from tests.exhaustive.architectures import vllm_classes


def test_the_listed_classes_are_those_of_the_registry():
    registered = set(ModelRegistry.get_supported_archs())
    assert vllm_classes() == registered & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
