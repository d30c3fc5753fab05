"""From a grammar's text to what follows it along tokens, beside the caller's thread; the latest ones are kept.

Compiling is bounded in work and memory, and so is following what was compiled: who asks for more is told so.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from actors.grammars.masking import GrammarMasking
from actors.grammars.matcher import TextGrammar
from cluster.errors import GrammarError, ModelError
from protos.messages import Open

_logger = logging.getLogger(__name__)

KEPT = 64  # compiled grammars
MAX_MESSAGE_CHARS = 1024
PLAINLY = {  # what the library's own word means
    "NoExtensionBias": "no text meets this: nothing can stand at its beginning, for instance because a rule or a $ref"
    " leads only to itself; expected one that leads to a type or a text",
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf": (
        "a oneOf whose options may match the same value is not supported; use anyOf, or options of different types"
    ),
}
LIMITS = LLParserLimits(
    max_lexer_states=20_000,  # of 1 to 2 kB
    max_grammar_size=100_000,
    step_lexer_fuel=100_000,  # of one mask: 7 ms
    step_max_items=4_000,  # of one mask; the library's own bound of 50 000 may take a second
    precompute_large_lexemes=False,  # what is never reached is never paid for
    verbose_errors=False,
)


def grammars_of(vocabulary: Callable[[], LLTokenizer]) -> "GrammarCompiler | None":
    """Over a vocabulary; None, and a word in the log, for a model whose texts cannot have any."""
    try:
        return GrammarCompiler(vocabulary())
    except ModelError as error:
        _logger.warning("no structured output: %s", error)
        return None


class GrammarCompiler:
    """The grammars over one vocabulary. Any thread may ask; one compiles, so that grammars never take more than a core.

    `kept` compiled ones stay, those used last, whether they could be compiled or not.
    """

    def __init__(self, tokenizer: LLTokenizer, kept: int = KEPT) -> None:
        self._tokenizer = tokenizer
        self._kept = kept
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()  # by text, latest use last
        self._lock = Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")

    def begin(self, grammar: str) -> "Future[LLMatcher]":
        """Has a grammar compiled, unless it is; the future raises GrammarError where that cannot be."""
        with self._lock:
            if grammar not in self._compiled:
                self._compiled[grammar] = self._thread.submit(self._compile, grammar)
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > self._kept:
                self._compiled.popitem(last=False)
            return self._compiled[grammar]

    def follow(self, grammar: str) -> TextGrammar:
        """The grammar from its beginning, once it is compiled. Raises GrammarError."""
        return TextGrammar(self.begin(grammar).result().deep_copy(), self._tokenizer.eos_tokens)

    def fault(self, grammar: str) -> str | None:
        """Compiles a grammar; what is wrong with it, if anything is."""
        error = self.begin(grammar).exception()
        if error is not None and not isinstance(error, GrammarError):
            raise error
        return None if error is None else str(error)

    def masking(self, request: Open) -> GrammarMasking | None:
        """A session's logits processor; None where any text will do. What it needs begins to be compiled."""
        if not request.grammar:
            return None
        self.begin(request.grammar)
        return GrammarMasking(partial(self.follow, request.grammar))

    def draft_masking(self, request: Open) -> GrammarMasking | None:
        """The same for a drafter: where it cannot compile a grammar, it drafts as if there were none."""
        try:
            return self.masking(request) if request.grammar and self.begin(request.grammar).result() else None
        except GrammarError as error:
            _logger.warning("session %s is drafted for without its grammar: %s", request.session, error)
            return None

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        trial = matcher.deep_copy()
        if not matcher.is_error():
            trial.compute_bitmask()  # what no text meets shows only here
        if trial.is_error():
            why, *_ = trial.get_error().split("\n<")  # what follows is for the library's developers
            raise GrammarError(PLAINLY.get(why, why)[:MAX_MESSAGE_CHARS])
        return matcher
