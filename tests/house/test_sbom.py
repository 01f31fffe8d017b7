"""The bill of materials: every locked package is in it with its hash, and it has CycloneDX's form."""

import json
import re
import sys

import jsonschema
import pytest
from test_locks import FOLDER, NAMES, ROOT, lines

SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["bomFormat", "specVersion", "serialNumber", "version", "metadata", "components", "dependencies"],
    "properties": {
        "bomFormat": {"const": "CycloneDX"},
        "specVersion": {"const": "1.6"},
        "serialNumber": {
            "pattern": "^urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
        },
        "version": {"const": 1},
        "metadata": {"required": ["component"]},
        "components": {
            "uniqueItems": True,
            "items": {
                "required": ["type", "bom-ref", "name", "version", "purl", "hashes", "properties"],
                "properties": {
                    "type": {"const": "library"},
                    "purl": {"pattern": "^pkg:pypi/[a-z0-9][a-z0-9-]*@[0-9][0-9a-z.%+A-Z]*$"},
                    "hashes": {
                        "minItems": 1,
                        "items": {
                            "properties": {"alg": {"const": "SHA-256"}, "content": {"pattern": "^[0-9a-f]{64}$"}},
                        },
                    },
                },
            },
        },
        "dependencies": {"items": {"required": ["ref"]}},
    },
}
"""The parts of CycloneDX 1.6's schema that the bill uses; its own file is not among our packages."""


@pytest.fixture
def sbom(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import sbom

    yield sbom
    sys.modules.pop("sbom", None)


def test_the_bill_has_the_form_of_cyclonedx(sbom):
    made = json.loads(json.dumps(sbom.bill()))
    jsonschema.validate(made, SCHEMA)
    references = [each["bom-ref"] for each in made["components"]]
    assert len(set(references)) == len(references)
    ((subject, needed),) = ((each["ref"], each["dependsOn"]) for each in made["dependencies"])
    assert subject == made["metadata"]["component"]["bom-ref"] and needed == references
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(made | {"specVersion": "1.7"}, SCHEMA)


def test_every_line_of_every_lock_is_a_component_with_its_hash(sbom):
    made = {
        (each["name"], each["version"], each["hashes"][0]["content"], lock["value"])
        for each in sbom.bill()["components"]
        for lock in each["properties"]
    }
    wanted = set()
    for lock in (*NAMES, "torch"):
        for line in lines(f"{lock}.txt"):
            pin, sha256 = line.split(" --hash=sha256:")
            wanted.add((*pin.split("=="), sha256, lock))
    assert made == wanted and len(wanted) > 300
    assert sbom.purl("torch", "2.13.0+cpu") == "pkg:pypi/torch@2.13.0%2Bcpu"


def test_the_same_locks_give_the_same_bill_and_others_another(sbom):
    assert sbom.bill() == sbom.bill()
    assert sbom.bill(("cpu",))["serialNumber"] != sbom.bill(("gpu",))["serialNumber"]
    names = {each["name"] for each in sbom.bill(("cpu",))["components"]}
    assert "ray" in names and "pytest" not in names


def test_a_line_that_is_no_pin_is_an_error(sbom, tmp_path, monkeypatch):
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "cpu.txt").write_text("# head\nray>=2\n")
    monkeypatch.setattr(sbom, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=re.escape("requirements/cpu.txt: not a pin with one hash: ray>=2")):
        sbom.pins("cpu")


def test_all_locks_of_the_folder_are_in_the_bill(sbom):
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(sbom.LOCKS)
