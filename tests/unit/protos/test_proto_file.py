"""Every field, value, message and call of the protocol has a comment."""

import re
from collections.abc import Iterator
from pathlib import Path

import protos
from protos import speculation_pb2 as pb

PROTO = Path(protos.__file__).with_name("speculation.proto")
DECLARATION = re.compile(
    r"^\s*(?:(?:message|enum|service|rpc)\s+(\w+)|(?:(?:repeated|optional)\s+)?(?:[\w.]+\s+)?(\w+)\s*=\s*\d+;)"
)


def declared() -> Iterator[tuple[str, bool]]:
    """Yields every declared name, and whether a comment precedes it directly."""
    above = ""
    for line in PROTO.read_text().splitlines():
        if match := DECLARATION.match(line):
            yield match[1] or match[2], above.strip().startswith("//")
        above = line


def names_in_descriptor() -> list[str]:
    file = pb.DESCRIPTOR
    names = [*file.message_types_by_name, *file.enum_types_by_name, *file.services_by_name]
    names += [field.name for message in file.message_types_by_name.values() for field in message.fields]
    names += [value.name for enum in file.enum_types_by_name.values() for value in enum.values]
    return names + [call.name for service in file.services_by_name.values() for call in service.methods]


def test_every_proto_field_has_a_comment():
    found = list(declared())
    assert sorted(name for name, _ in found) == sorted(names_in_descriptor()), (
        "this test does not see every declaration"
    )
    assert [name for name, commented in found if not commented] == []
