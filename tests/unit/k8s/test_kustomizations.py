"""Kustomizations and cert-manager objects have no unknown keys, and reference only existing files and objects."""

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.unit.k8s.overlays import COMPONENTS, K8S, OVERLAYS, Json, errors, load, of_kind
from tests.unit.k8s.schemas import CERT_MANAGER, SCHEMAS

FOLDERS = sorted(path.parent for path in K8S.rglob("kustomization.yaml"))
CERTIFICATES = K8S / "components" / "certificates" / "certificates.yaml"
BY_HAND = {"kustomization.yaml", "slipstream.yaml"}  # in no kustomization


def kustomization(folder: Path) -> Json:
    (found,) = load(folder / "kustomization.yaml")
    return found


def named(found: Json) -> list[str]:
    """Returns the files and folders in a kustomization."""
    patches = [patch["path"] for patch in found.get("patches", [])]
    files = [file for made in found.get("configMapGenerator", []) for file in made["files"]]
    return [*found.get("resources", []), *found.get("components", []), *patches, *files]


def misspelt(manifest: Json, *path: str | int) -> Json:
    """Returns a copy with a surplus key at this place."""
    changed = copy.deepcopy(manifest)
    place: Any = changed
    for step in path:
        place = place[step]
    place["nmae"] = "x"
    return changed


def test_every_folder_is_checked() -> None:
    overlays = [K8S / "overlays" / name for name in OVERLAYS]
    assert [K8S / "base", *(K8S / "components" / name for name in COMPONENTS), *overlays] == FOLDERS


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
class TestKustomizations:
    def test_a_kustomization_is_valid_and_has_its_folders_kind(self, folder: Path) -> None:
        found = kustomization(folder)
        kind = "Component" if folder.parent.name == "components" else "Kustomization"
        assert errors(SCHEMAS[kind], found) == []

    def test_a_misspelt_key_is_refused(self, folder: Path) -> None:
        found = kustomization(folder)
        places: list[tuple[str | int, ...]] = [
            (),
            *((key, 0) for key in ("patches", "configMapGenerator") if key in found),
        ]
        assert [len(errors(SCHEMAS[found["kind"]], misspelt(found, *place))) for place in places] == [1] * len(places)

    def test_referenced_files_exist_and_have_the_right_kind(self, folder: Path) -> None:
        found = kustomization(folder)
        assert [name for name in named(found) if not (folder / name).exists()] == []
        assert [kustomization(folder / name)["kind"] for name in found.get("components", [])] == ["Component"] * len(
            found.get("components", [])
        )
        folders = [folder / name for name in found.get("resources", []) if (folder / name).is_dir()]
        assert [kustomization(each)["kind"] for each in folders] == ["Kustomization"] * len(folders)

    def test_every_file_of_the_folder_is_referenced(self, folder: Path) -> None:
        files = {path.name for path in folder.iterdir() if path.is_file()}
        assert files - BY_HAND == {name for name in named(kustomization(folder)) if "/" not in name}


class TestCertManager:
    def test_components_objects_are_valid(self) -> None:
        found = load(CERTIFICATES)
        assert {each["apiVersion"] for each in found} == {CERT_MANAGER}
        assert [error for each in found for error in errors(SCHEMAS[each["kind"]], each)] == []

    @pytest.mark.parametrize("path", [(), ("metadata",), ("spec",), ("spec", "privateKey"), ("spec", "issuerRef")])
    def test_a_misspelt_key_is_refused(self, path: tuple[str, ...]) -> None:
        for each in of_kind(load(CERTIFICATES), "Certificate"):
            assert len(errors(SCHEMAS["Certificate"], misspelt(each, *path))) == 1

    def test_an_issuer_has_one_kind(self) -> None:
        for each in of_kind(load(CERTIFICATES), "Issuer"):
            both = each | {"spec": {"selfSigned": {}, "ca": {"secretName": "x"}}}
            neither = each | {"spec": {}}
            assert [len(errors(SCHEMAS["Issuer"], wrong)) for wrong in (both, neither)] == [1, 1]
            assert errors(SCHEMAS["Issuer"], misspelt(each, "spec")) != []

    def test_issuers_and_their_secrets_exist(self) -> None:
        found = load(CERTIFICATES)
        issuers = of_kind(found, "Issuer")
        certificates = of_kind(found, "Certificate")
        authorities = {each["spec"]["secretName"] for each in certificates if each["spec"].get("isCA")}
        names = {each["metadata"]["name"] for each in issuers}
        assert {each["spec"]["issuerRef"]["name"] for each in certificates} == names
        assert {each["spec"]["ca"]["secretName"] for each in issuers if "ca" in each["spec"]} == authorities

    def test_a_certificate_is_renewed_before_it_expires(self) -> None:
        """The operator refuses a renewal time beyond the lifetime; by default, it renews after two thirds of it."""
        for each in of_kind(load(CERTIFICATES), "Certificate"):
            hours = [int(each["spec"].get(key, "0h").removesuffix("h")) for key in ("renewBefore", "duration")]
            assert hours[0] < hours[1]
