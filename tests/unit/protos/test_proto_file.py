"""The protocol's comments are complete, and the requirements admit no runtime older than its stubs."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import protos
from protos import speculation_pb2 as pb
from protos.speculation_pb2_grpc import GRPC_GENERATED_VERSION

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


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def test_every_proto_field_has_a_comment():
    found = list(declared())
    assert sorted(name for name, _ in found) == sorted(names_in_descriptor()), (
        "this test does not see every declaration"
    )
    assert [name for name, commented in found if not commented] == []


def test_lower_bounds_admit_no_runtime_older_than_the_stubs():
    """The stubs refuse an older runtime when imported; grpcio-tools writes its own version into them."""
    project = tomllib.loads((PROTO.parents[1] / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    lower = dict(re.findall(r"^(grpcio[\w-]*|protobuf)>=([\d.]+)", "\n".join(requirements), re.MULTILINE))
    generated = re.search(r"Protobuf Python Version: ([\d.]+)", PROTO.with_name("speculation_pb2.py").read_text())
    needed = dict.fromkeys(lower, GRPC_GENERATED_VERSION) | {"protobuf": generated[1]}
    assert len(lower) == 5
    assert {name for name in lower if version(lower[name]) < version(needed[name])} == set()
