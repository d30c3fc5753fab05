"""What an answer has cost, and what became of its drafts."""

from collections import Counter
from collections.abc import Sequence

from serve_app.http.generation_stream import Choice
from serve_app.http.wire.replies import (
    CompletionTokensDetails,
    PromptTokensDetails,
    RequestMetrics,
    SpeculativeDecoding,
    Usage,
)


def usage_of(choices: Sequence[Choice], prompt_tokens: int, reasoning_tokens: int) -> Usage:
    """What they have cost so far; of each prompt once, however many choices it has."""
    transcripts = [choice.transcript for choice in choices]
    completion_tokens = sum(transcript.tokens for transcript in transcripts)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=sum(choice.transcript.cached for choice in choices if choice.generation.choice == 0)
        ),
        completion_tokens_details=CompletionTokensDetails(
            accepted_prediction_tokens=sum(transcript.accepted for transcript in transcripts),
            rejected_prediction_tokens=sum(transcript.rejected for transcript in transcripts),
            reasoning_tokens=reasoning_tokens,
        ),
    )


def metrics_of(choices: Sequence[Choice]) -> RequestMetrics | None:
    """What became of their drafts; None where there were none."""
    counts = sum((choice.transcript.accepted_by_step for choice in choices), Counter[int]())
    steps = counts.total()
    if not steps:
        return None
    most = max(max(counts), *(choice.generation.max_draft_tokens for choice in choices))
    accepted = sum(length * count for length, count in counts.items())
    drafted = sum(choice.transcript.drafted for choice in choices)
    return RequestMetrics(
        speculative_decoding=SpeculativeDecoding(
            acceptance_histogram=tuple([counts[length] for length in range(most + 1)]),
            num_spec_tokens=most,
            num_spec_steps=steps,
            num_draft_tokens=drafted,
            num_accepted_draft_tokens=accepted,
            draft_acceptance_rate=accepted / drafted,
            mean_acceptance_length=1 + accepted / steps,
        )
    )
