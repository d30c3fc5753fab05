"""The text of a call in JSON: as the response parser is to see it, and its arguments as the model wrote them; pure.

The parser ends a call at the first mark that ends calls, in a string as well. So what stands in a string reaches it in
an escaped form, which JSON reads as the same.
"""

import json
import re
from itertools import islice
from typing import Any

MOST_PLACES = 16  # that are tried for where arguments begin: a call may hold very many braces
LINE_ENDS = frozenset("\n\r")  # no string of JSON holds one: the string was never closed
LAST_IN_ONE_ESCAPE = "\uffff"

_BRACE = re.compile(r"\{")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


class CallText:
    """One call, or several in one list, as it grows by characters."""

    def __init__(self) -> None:
        self._chars: list[str] = []
        self._in_string = False
        self._is_escaped = False
        self._is_broken = False
        self._told = 0  # characters up to the end of the last arguments

    def take(self, char: str) -> str:
        """The character as the parser is to see it."""
        self._chars.append(char)
        if self._is_broken:
            return char
        if not self._in_string:
            self._in_string = char == '"'
            return char
        if self._is_escaped:
            self._is_escaped = False
            return char
        self._is_broken = char in LINE_ENDS
        self._is_escaped = char == "\\"
        self._in_string = char != '"'
        return _escaped(char) if self._in_string and not self._is_escaped else char

    def arguments(self, read: Any) -> str:
        """The next arguments as they are written, where the parser has `read` them from an object there.

        Others are written anew. Raises ValueError for what JSON cannot hold.
        """
        text = "".join(self._chars)
        for brace in islice(_BRACE.finditer(text, self._told), MOST_PLACES):
            try:
                found, end = _DECODER.raw_decode(text, brace.start())
            except ValueError:
                continue
            if found == read:
                self._told = end
                return text[brace.start() : end]
        return written_anew(read)


def written_anew(arguments: Any) -> str:
    """As JSON. Raises ValueError for a number that JSON has not, and for text that UTF-8 has not."""
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    written.encode()
    return written


def _escaped(char: str) -> str:
    """What may be part of a mark, as JSON may have it instead."""
    is_plain = char.isalnum() or char.isspace() or char > LAST_IN_ONE_ESCAPE
    return char if is_plain else f"\\u{ord(char):04x}"
