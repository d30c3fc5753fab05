"""Our metrics under vLLM's names, for dashboards, autoscalers and load generators made for vLLM.

Nothing is measured twice: a family that vLLM has too is read again under vLLM's name at collection.
"""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

PREFIX = "vllm:"
MODEL = "model_name"

NAMES: Mapping[str, str] = {
    "slipstream_prompt_tokens": "prompt_tokens",
    "slipstream_completion_tokens": "generation_tokens",
    "slipstream_finished": "request_success",
    "slipstream_request_seconds": "e2e_request_latency_seconds",
    "slipstream_time_to_first_token_seconds": "time_to_first_token_seconds",
    "slipstream_inter_token_seconds": "inter_token_latency_seconds",
    "slipstream_time_per_output_token_seconds": "request_time_per_output_token_seconds",
    "slipstream_request_prompt_tokens": "request_prompt_tokens",
    "slipstream_request_completion_tokens": "request_generation_tokens",
    "slipstream_blocks": "spec_decode_num_drafts",
    "slipstream_draft_tokens": "spec_decode_num_draft_tokens",
    "slipstream_accepted_tokens": "spec_decode_num_accepted_tokens",
    "slipstream_accepted_tokens_at": "spec_decode_num_accepted_tokens_per_pos",
}
"""A router's families that vLLM has too, with vLLM's names."""


class VllmNames(Collector):
    """Families of a registry that vLLM has too, under vLLM's names and with its label for the model."""

    def __init__(self, source: Collector, model: str, names: Mapping[str, str] = NAMES) -> None:
        self._source = source
        self._model = model
        self._names = names

    def collect(self) -> Iterator[Metric]:
        for family in self._source.collect():
            if (name := self._names.get(family.name)) is not None:
                yield renamed(family, PREFIX + name, {MODEL: self._model})


def renamed(family: Metric, name: str, labels: Mapping[str, str]) -> Metric:
    """Returns the family under another name, with further labels."""
    made = Metric(name, family.documentation, family.type)
    made.samples = [
        Sample(name + sample.name.removeprefix(family.name), {**sample.labels, **labels}, sample.value)
        for sample in family.samples
    ]
    return made


def with_labels(families: Iterable[Metric], labels: Mapping[str, str]) -> Iterator[Metric]:
    """Adds labels to families."""
    return (renamed(family, family.name, labels) for family in families)
