"""The site of all pages builds without a warning, and its references have every function."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from honed.runtime import Client

from .texts import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it: a broken link is a warning, and a warning an error."""
    folder = tmp_path_factory.mktemp("site")
    options = ["-q", "-W", "--keep-going", "-b", "html", "-c", "docs", "-d", str(folder / "doctrees")]
    # Debian's Sphinx, as `make docs` and the package have it.
    command = ["/usr/bin/sphinx-build", *options, ".", str(folder / "html")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return folder / "html"


def test_every_page_is_in_the_site(site: Path) -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "examples" / "README.md"]
    names = [page.relative_to(ROOT).with_suffix(".html") for page in pages]
    assert [name for name in names if not (site / name).exists()] == []
    navigation = (site / "docs" / "README.html").read_text()
    assert [name for name in names if f"{name.name}" not in navigation and name.name != "README.html"] == []


def test_the_references_have_every_function(site: Path) -> None:
    python = (site / "docs" / "api" / "python.html").read_text()
    public = [name for name in dir(Client) if not name.startswith("_") and callable(getattr(Client, name))]
    assert [name for name in public if f'id="honed.runtime.Client.{name}"' not in python] == []
    assert "RpcSteps" not in python, "methods return their result"
    c = (site / "docs" / "api" / "c.html").read_text()
    header = (ROOT / "libhoned" / "include" / "honed.h").read_text()
    functions = re.findall(r"^HONED_API .*?\b(honed_\w+)\(", header, re.M)
    assert len(functions) > 50
    assert [name for name in functions if f'id="c.{name}"' not in c] == []
