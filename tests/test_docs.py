"""The documents point at things that exist: files, rooms, sections of the model specification."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dsv4_cluster"
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
PYTHON_FILES = [path for folder in ("dsv4_cluster", "kernels", "tests") for path in (ROOT / folder).rglob("*.py")]


def test_every_section_of_the_specification_that_code_cites_exists():
    text = (ROOT / "docs" / "model-spec.md").read_text()
    sections = set(re.findall(r"^## (\d+)\.|^\*\*(\d+\.\d+)", text, re.MULTILINE))
    existing = {chapter or section for chapter, section in sections}

    cited = {}
    for path in PYTHON_FILES:
        for numbers in re.findall(r"\bspec ((?:\d+(?:\.\d+)?(?:, | to | and )?)+)", path.read_text()):
            cited |= dict.fromkeys(re.findall(r"\d+(?:\.\d+)?", numbers), path.name)

    assert len(cited) > 20
    assert not {number: name for number, name in cited.items() if number not in existing}


def test_every_file_that_the_map_names_exists():
    named = set(re.findall(r"`((?:\w+/)+\w+\.(?:py|yaml|md))`", ARCHITECTURE))
    for room, files in re.findall(r"^\| `([\w/]+)/` \|[^|]*\|([^|]*)\|$", ARCHITECTURE, re.MULTILINE):
        named |= {name if "/" in name else f"{room}/{name}" for name in re.findall(r"`([\w/]+\.py)`", files)}
    bases = (PACKAGE, ROOT, ROOT / "kernels" / "dsv4_kernels")

    assert len(named) > 60
    assert not {name for name in named if not any((base / name).is_file() for base in bases)}


def test_every_room_is_on_the_map():
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}

    assert not {room for room in rooms if f"`{room}/`" not in ARCHITECTURE}


def test_links_between_documents_lead_somewhere():
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    broken = [
        (document.name, target)
        for document in documents
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text())
        if not (document.parent / target).exists()
    ]

    assert not broken
