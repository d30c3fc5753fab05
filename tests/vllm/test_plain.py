"""Unmodified vLLM gives the same greedy texts as a vLLM target."""

from pathlib import Path

from tests.vllm.cases import SAMPLINGS, prompts
from tests.vllm.scripted import CONTEXT, VOCABULARY

NEW_TOKENS = 40
GREEDY = ("greedy", "greedy_penalized", "repetitive")  # greedy, so independent of sampling noise


def test_plain_vllm_gives_the_same_text(tiny_llama: Path, whole: dict[str, list[int]]) -> None:
    """`test_core` compares `whole` with a vLLM target for every kind of block."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(tiny_llama),
        dtype="float32",
        max_model_len=CONTEXT,
        max_num_seqs=8,
        enforce_eager=True,
        block_size=32,
        kv_cache_memory_bytes=100 << 20,
    )
    asked = {session: prompt for session, prompt in prompts().items() if session.partition("-")[0] in GREEDY}
    params = []
    for session in asked:
        sampling = SAMPLINGS[session.partition("-")[0]]
        params.append(
            SamplingParams(
                temperature=0,
                max_tokens=NEW_TOKENS,
                ignore_eos=True,
                allowed_token_ids=list(range(VOCABULARY)),  # the tokenizer's tokens
                frequency_penalty=sampling.frequency_penalty,
                presence_penalty=sampling.presence_penalty,
                repetition_penalty=sampling.repetition_penalty,
            )
        )
    extra_results = llm.generate([{"prompt_token_ids": prompt} for prompt in asked.values()], params, use_tqdm=False)
    assert len(asked) == 2 * len(GREEDY)
    for (session, prompt), output in zip(asked.items(), extra_results, strict=True):
        assert [*prompt, *output.outputs[0].token_ids] == whole[session], session
