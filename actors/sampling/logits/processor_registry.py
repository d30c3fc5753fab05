"""All kinds of logits processors, in the order in which they change logits: masks, then bias, then penalties.

The order is vLLM's. A processor of another kind is a module with a maker, and a line here.
"""

from actors.sampling.logits.penalties import make_penalties
from actors.sampling.logits.processor import Maker, ProcessorChain
from actors.sampling.logits.token_rules import make_allowed, make_bad_words, make_bias, make_no_early_end
from protos.messages import Open

MAKERS: tuple[Maker, ...] = (make_allowed, make_bad_words, make_no_early_end, make_bias, make_penalties)


def chain_of(request: Open, makers: tuple[Maker, ...] = MAKERS) -> ProcessorChain | None:
    """A session's processors; None for a plain request, whose logits nobody touches.

    An engine or a drafting method whose processors need more than the Open, such as a tokenizer, binds it to makers of
    its own and hands those in.
    """
    processors = [made for maker in makers if (made := maker(request)) is not None]
    return ProcessorChain(request, processors) if processors else None
