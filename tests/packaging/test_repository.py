"""The apt repository that `make repo` makes, of small packages, and what apt takes from it over HTTP.

packaging/repo-test installs the real ones from it in a container.
"""

from __future__ import annotations

import functools
import html
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

BUILD = Path(__file__).resolve().parents[2] / "packaging/repository/build.py"
TOOLS = ("aptly", "apt-get", "dpkg-deb", "gpg")
pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, TOOLS)), reason="needs the Debian packages aptly, apt, dpkg and gpg"
)


def package(folder: Path, name: str, version: str, architecture: str, text: str = "") -> Path:
    """A package with one file that says `text`, in a folder."""
    tree = folder / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "usr/share" / name).mkdir(parents=True)
    (tree / "usr/share" / name / "text").write_text(f"{name} {version} {text}")
    (tree / "DEBIAN/control").write_text(
        f"Package: {name}\nVersion: {version}\nArchitecture: {architecture}\n"
        "Maintainer: honed <honed@example.org>\nDescription: made up\n"
    )
    file = folder / f"{name}_{version}_{architecture}.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "--build", tree, file], check=True, capture_output=True)
    shutil.rmtree(tree)
    return file


@dataclass
class Maker:
    """Makes repositories, with a home of its own for keys."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)

    @property
    def dist(self) -> Path:
        """Where the packages are."""
        return self.folder / "dist"

    @property
    def output(self) -> Path:
        """The repository."""
        return self.dist / "repo"

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        """`make repo`."""
        command = [sys.executable, str(BUILD), "--dist", str(self.dist), *options]
        env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(self.folder), **self.env}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    def made(self, *options: str) -> None:
        """`make repo`, which succeeds."""
        done = self.run(*options)
        assert done.returncode == 0, done.stdout + done.stderr

    def refused(self, *options: str) -> str:
        """Why `make repo` makes nothing."""
        done = self.run(*options)
        assert done.returncode == 1, done.stdout
        assert "Traceback" not in done.stderr
        return done.stderr

    def fingerprint(self) -> str:
        """The key that the page names."""
        found = re.search('id="fingerprint">([0-9A-F]{40})<', (self.output / "index.html").read_text())
        assert found
        return found[1]


def maker_in(folder: Path) -> Maker:
    """With packages of one version, as `make deb` leaves them."""
    maker = Maker(folder)
    (maker.dist / "trixie").mkdir(parents=True)
    add(maker, "0.1.0")
    return maker


def add(maker: Maker, version: str) -> None:
    """Packages of another version, for two suites and two architectures."""
    for where, own in ((maker.dist, version), (maker.dist / "trixie", f"{version}+deb13")):
        package(where, "honed", own, "all")
        for architecture in ("amd64", "arm64"):
            package(where, "honed-tuner", own, architecture)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """A repository, and how it was made."""
    maker = maker_in(tmp_path_factory.mktemp("repository"))
    maker.made()
    return maker


@pytest.fixture
def own(made: Maker, tmp_path: Path) -> Maker:
    """A copy that a test may change."""
    shutil.copytree(made.folder, tmp_path / "own")
    return Maker(tmp_path / "own")


@dataclass
class Apt:
    """An apt with nothing but a repository, installed by the lines of its page."""

    folder: Path
    page: str
    url: str

    def run(self, *arguments: str, tool: str = "apt-get") -> subprocess.CompletedProcess[str]:
        """apt-get, here."""
        options = (
            f"Dir={self.folder}", f"Dir::State::status={self.folder}/status", "APT::Sandbox::User=root",
            "APT::Architecture=arm64", "APT::Architectures::=arm64", "Acquire::Retries=0",
            "Acquire::http::Proxy=DIRECT", "APT::Update::Error-Mode=any",
        )  # fmt: skip
        command = [tool, *(text for one in options for text in ("-o", one)), *arguments]
        env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
        return subprocess.run(
            command, env=env, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, check=False,
        )  # fmt: skip

    def done(self, *arguments: str, tool: str = "apt-get") -> str:
        """What it says, having succeeded."""
        done = self.run(*arguments, tool=tool)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def refused(self, *arguments: str) -> str:
        """What it says, having failed."""
        done = self.run(*arguments)
        assert done.returncode != 0, done.stdout
        return done.stdout

    def known(self) -> str:
        """What it would install."""
        return self.done("policy", "honed", tool="apt-cache")


def apt_for(maker: Maker, folder: Path, url: str, suite: str = "bookworm") -> Apt:
    """As the page says, but for the place of what it writes."""
    for name in ("etc/apt/sources.list.d", "etc/apt/keyrings", "var/lib/apt/lists/partial"):
        (folder / name).mkdir(parents=True)
    (folder / "var/cache/apt/archives/partial").mkdir(parents=True)
    (folder / "status").touch()
    text = (maker.output / "index.html").read_text()
    (lines,) = re.findall(r'<pre id="lines">(.*?)</pre>', text, re.DOTALL)
    lines = html.unescape(re.sub(r"<[^>]*>", "", lines)).replace("http://YOUR-SERVER/honed", url)
    (sources,) = re.findall(r"<<END\n(.*?)END\n", lines, re.DOTALL)
    sources = re.sub(r"\$\(.*\)", suite, sources)
    sources = sources.replace("/etc/apt/keyrings", f"{folder}/etc/apt/keyrings")
    (folder / "etc/apt/sources.list.d/honed.sources").write_text(sources)
    shutil.copy(maker.output / "honed.asc", folder / "etc/apt/keyrings")
    return Apt(folder, lines, url)


class _Quiet(SimpleHTTPRequestHandler):
    def log_request(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def serve() -> Iterator[Callable[[Path], str]]:
    """Serves a folder over HTTP; gives its URL."""
    servers: list[ThreadingHTTPServer] = []

    def start(folder: Path) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
        serving = functools.partial(server.serve_forever, poll_interval=0.005)
        threading.Thread(target=serving, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


Serve = Callable[[Path], str]


@pytest.mark.parametrize(("suite", "version"), [("bookworm", "0.1.0"), ("trixie", "0.1.0+deb13")])
def test_apt_installs_what_was_built(
    made: Maker, serve: Serve, tmp_path: Path, suite: str, version: str
) -> None:
    apt = apt_for(made, tmp_path / "apt", serve(made.output), suite)
    apt.done("update")
    apt.done("download", "honed", "honed-tuner")
    built = made.dist if suite == "bookworm" else made.dist / suite
    for name in (f"honed_{version}_all.deb", f"honed-tuner_{version}_arm64.deb"):
        (fetched,) = apt.folder.glob(name.replace("+", "*"))
        assert fetched.read_bytes() == (built / name).read_bytes()


def test_the_page_tells_how(made: Maker) -> None:
    text = (made.output / "index.html").read_text()
    shown = subprocess.run(
        ["gpg", "--show-keys", "--with-colons", made.output / "honed.asc"],
        env={"PATH": "/usr/bin:/bin", "GNUPGHOME": str(made.folder)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert f":{made.fingerprint()}:" in shown
    assert "Debian 12 (bookworm) and Debian 13 (trixie)" in text
    assert "<td>honed-tuner</td><td>0.1.0</td><td>amd64, arm64</td>" in text


def test_a_url_is_written_in_the_page(own: Maker) -> None:
    own.made("--url", "https://example.org/honed/")
    text = (own.output / "index.html").read_text()
    assert '<span class="url">https://example.org/honed</span>/honed.asc' in text
    assert "<script>" not in text


def test_a_newer_version_is_taken_and_the_old_one_stays(own: Maker, serve: Serve, tmp_path: Path) -> None:
    apt = apt_for(own, tmp_path / "apt", serve(own.output))
    apt.done("update")
    add(own, "0.10.0")
    key = own.fingerprint()
    own.made()
    assert own.fingerprint() == key, "the key that was made is kept"
    apt.done("update")
    assert "Candidate: 0.10.0\n" in apt.known()
    apt.done("download", "honed")
    apt.done("download", "honed=0.1.0")


def test_no_secret_is_published(made: Maker) -> None:
    files = [path for path in made.output.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if b"PRIVATE KEY" in path.read_bytes()]
    assert not [path for path in files if path.stat().st_mode & 0o444 != 0o444]
    (key,) = made.folder.rglob("repository-key.asc")
    assert key.stat().st_mode & 0o077 == 0


def test_a_key_of_ones_own_signs(tmp_path: Path, own: Maker) -> None:
    home = tmp_path / "gnupg"
    home.mkdir(mode=0o700)
    env = {"PATH": "/usr/bin:/bin", "GNUPGHOME": str(home)}
    options = ["--batch", "--passphrase", "", "--quick-generate-key", "us@example.org", "ed25519", "sign"]
    subprocess.run(["gpg", *options], env=env, check=True, capture_output=True)
    before = own.fingerprint()
    theirs = Maker(own.folder, {"GNUPGHOME": str(home)})
    theirs.made("--key", "us@example.org")
    assert theirs.fingerprint() != before
    assert "gpg has no secret key 'nobody'" in theirs.refused("--key", "nobody")
    subprocess.run(["gpgconf", "--kill", "gpg-agent"], env=env, check=True)


def test_another_key_is_refused(made: Maker, serve: Serve, tmp_path: Path) -> None:
    other = maker_in(tmp_path / "other")
    other.made()
    apt = apt_for(made, tmp_path / "apt", serve(made.output))
    shutil.copy(other.output / "honed.asc", apt.folder / "etc/apt/keyrings")
    assert "not signed" in apt.refused("update")
    assert "Candidate" not in apt.known()


def test_a_changed_package_is_refused(own: Maker, serve: Serve, tmp_path: Path) -> None:
    apt = apt_for(own, tmp_path / "apt", serve(own.output))
    apt.done("update")
    (pooled,) = (own.output / "pool").rglob("honed_0.1.0_all.deb")
    data = bytearray(pooled.read_bytes())
    data[len(data) // 2] ^= 1
    pooled.write_bytes(data)
    assert "Hash Sum mismatch" in apt.refused("download", "honed")
    assert not list(apt.folder.glob("*.deb"))


def test_a_changed_index_is_refused(own: Maker, serve: Serve, tmp_path: Path) -> None:
    apt = apt_for(own, tmp_path / "apt", serve(own.output))
    release = own.output / "dists/bookworm/InRelease"
    release.write_text(release.read_text().replace("Origin: honed", "Origin: h0ned"))
    told = apt.refused("update")
    assert "invalid" in told or "has been manipulated" in told  # as gpgv says it, or sqv of Debian 13
    assert "Candidate" not in apt.known()


def test_an_unsigned_repository_is_refused(own: Maker, serve: Serve, tmp_path: Path) -> None:
    apt = apt_for(own, tmp_path / "apt", serve(own.output))
    for name in ("InRelease", "Release.gpg"):
        (own.output / "dists/bookworm" / name).unlink()
    assert "is not signed" in apt.refused("update")
    assert "Candidate" not in apt.known()


def test_nothing_built_is_told(tmp_path: Path) -> None:
    maker = Maker(tmp_path)
    maker.dist.mkdir()
    assert "make deb" in maker.refused()


def test_other_contents_under_a_version_are_refused(own: Maker) -> None:
    package(own.dist, "honed", "0.1.0", "all", "built from another commit")
    assert "raise the version" in own.refused()
    shutil.rmtree(own.output)
    own.made()


def test_half_a_version_is_refused(own: Maker) -> None:
    package(own.dist, "honed", "0.2.0", "all")
    told = own.refused()
    assert "bookworm has 0.2.0, but honed-tuner 0.1.0 (amd64), honed-tuner 0.1.0 (arm64)" in told
    assert (own.output / "index.html").exists(), "the repository stays as it was"
