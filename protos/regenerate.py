"""Regenerates the committed gRPC stubs from `speculation.proto`, or checks that they are up to date.

python -m protos.regenerate           # write the stubs
python -m protos.regenerate --check   # exit with status 1 if they are stale
"""

import argparse
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
STUBS = ("speculation_pb2.py", "speculation_pb2.pyi", "speculation_pb2_grpc.py")


def generate(folder: Path) -> None:
    """Writes the three stubs to `folder`/protos."""
    from grpc_tools import protoc

    out = str(folder)
    outputs = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    status = protoc.main(["protoc", f"-I{HERE.parent}", *outputs, str(HERE / "speculation.proto")])
    if status != 0:
        raise SystemExit(f"protoc failed with status {status}")


def stale_stubs() -> list[str]:
    """Returns the names of the committed stubs that differ from the generated ones."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = Path(scratch) / "protos"
        return [name for name in STUBS if (fresh / name).read_text() != (HERE / name).read_text()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare only; exit with status 1 if a stub is stale")
    if not parser.parse_args().check:
        generate(HERE.parent)
        return
    stale = stale_stubs()
    if stale:
        sys.exit(f"stale stubs: {', '.join(stale)}; run 'python -m protos.regenerate' and commit the result")
    print("stubs are current")


if __name__ == "__main__":
    main()
