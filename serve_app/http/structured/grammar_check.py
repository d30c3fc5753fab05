"""Whether a request's grammar can be kept to, found out by compiling it; beside the event loop."""

import asyncio

from actors.grammars.compiler import GrammarCompiler
from cluster.errors import GrammarError, RequestError
from serve_app.http.structured.response_format import AskedGrammar

COMPILE_S = 5.0  # with those that are compiled before it


class GrammarCheck:
    """Compiles what is asked for, as the target will; each grammar once."""

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        """Without a compiler, for a model whose texts cannot have any, all is refused."""
        self._compiler = compiler

    async def check(self, asked: AskedGrammar) -> None:
        """Raises RequestError that names the field."""
        if self._compiler is None:
            message = f"{asked.field} is not served for this model; the server's log says why at its start"
            raise RequestError(message, asked.field)
        compiling = asyncio.wrap_future(self._compiler.begin(asked.text))
        try:
            async with asyncio.timeout(COMPILE_S):
                await asyncio.shield(compiling)  # others may ask for the same
        except GrammarError as error:
            raise RequestError(f"{asked.field}: {error}", asked.field) from error
        except TimeoutError as error:
            message = f"{asked.field} was not compiled within {COMPILE_S} s; ask for something simpler, or try again"
            raise RequestError(message, asked.field) from error
