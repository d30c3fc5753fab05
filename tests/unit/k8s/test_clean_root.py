"""Tests the steps of `make image-steps` per variant, with their variables and copied files, without running them."""

from pathlib import Path, PurePosixPath

import pytest

from k8s.images.clean_root import IMAGES, CleanRoot, Failure, Step, is_ignored, leading_to_the_last, parsed

STEPS = parsed((IMAGES / "Dockerfile").read_text())
PATTERNS = ["*", "!LICENSE", "!protos", "**/__pycache__"]


def of(variant: str) -> list[Step]:
    return leading_to_the_last(STEPS, variant)[1]


def test_comments_and_line_continuations() -> None:
    assert parsed("# syntax\nFROM a\n\nRUN one \\\n    # why\n    && two # three\n") == [
        Step("FROM", "a"),
        Step("RUN", "one     && two # three"),
    ]


def test_a_variant_spans_from_base_image_to_command() -> None:
    image, steps = leading_to_the_last(STEPS, "cpu")
    assert image.startswith("python:3.11-slim-bookworm@")
    assert steps[-1] == Step("CMD", '["slipstream", "--help"]')
    (packages,) = [step.rest for step in steps if step.rest.startswith("k8s/images/requirements")]
    assert "requirements-cpu.txt" in packages
    assert not any("g++" in step.rest for step in steps)


def test_a_stage_includes_its_parents_steps() -> None:
    gpu = of("gpu")
    vllm = of("vllm")
    own = [step for step in vllm if step not in gpu]
    assert {step.rest.split()[0] for step in own} == {"k8s/images/requirements-vllm.txt", "pip"}
    assert [step for step in vllm if step not in own] == gpu
    assert vllm.index(own[0]) > vllm.index(next(step for step in gpu if "g++" in step.rest))


def test_an_unknown_variant_is_refused() -> None:
    assert leading_to_the_last(STEPS, "tpu")[0] == "tpu-packages"


@pytest.mark.parametrize(
    ("path", "out"),
    [
        ("Makefile", True),
        ("LICENSE", False),
        ("protos/codec.py", False),
        ("protos/__pycache__", True),
        ("protos/deep/__pycache__/a.pyc", True),
    ],
)
def test_the_last_matching_ignore_pattern_decides(path: str, out: bool) -> None:
    assert is_ignored(PurePosixPath(path), PATTERNS) is out


def test_variables_apply_to_later_steps(tmp_path: Path) -> None:
    clean = CleanRoot(tmp_path)
    for step in parsed(
        "WORKDIR /opt\nWORKDIR slip\nENV HOME_OF=/cuda B='a b'\nENV PATH=${HOME_OF}/bin:${PATH}\nUSER 1000\n"
    ):
        clean.take(step)
    assert (tmp_path / "opt" / "slip").is_dir()
    assert (clean.folder, clean.user, clean.env["B"]) == (PurePosixPath("/opt/slip"), "1000", "a b")
    assert clean.env["PATH"].startswith("/cuda/bin:/usr/local/bin:")


def test_ignored_files_are_not_copied(tmp_path: Path) -> None:
    clean = CleanRoot(tmp_path)
    for step in parsed("WORKDIR /opt\nCOPY LICENSE README.md ./\nCOPY protos protos\nCOPY LICENSE /opt/other\n"):
        clean.take(step)
    found = {str(path.relative_to(tmp_path / "opt")) for path in (tmp_path / "opt").rglob("*")}
    assert {"LICENSE", "README.md", "other", "protos/speculation.proto"} <= found
    assert not any("__pycache__" in path for path in found)


@pytest.mark.parametrize(
    "line", ["COPY Makefile ./", "COPY --from=other a b", 'ENTRYPOINT ["a"]', "COPY protos/none b"]
)
def test_invalid_and_unsupported_steps_fail(tmp_path: Path, line: str) -> None:
    (step,) = parsed(line)
    with pytest.raises(Failure):
        CleanRoot(tmp_path).take(step)
