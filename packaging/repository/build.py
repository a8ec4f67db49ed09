"""Makes a signed apt repository of the packages in dist/: static files, in dist/repo, for any web server.

Every suite and architecture that was built is in it, in every version that lies in dist/. Without a key of
yours one is made and kept in ~/.local/share/honed/repository-key.asc. All who install trust it: it must
not get lost, nor into other hands.
"""

from __future__ import annotations

import argparse
import filecmp
import html
import json
import os
import shutil
import string
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cmp_to_key
from pathlib import Path
from typing import Final, NoReturn

ROOT: Final = Path(__file__).resolve().parents[2]
SUITES: Final = {"bookworm": "Debian 12", "trixie": "Debian 13"}  # as packaging/build-deb knows them
KEY_FILE: Final = "honed.asc"
_BOARDS: Final = ("amd64", "arm64")  # where nothing but packages for all machines was built
_PLACEHOLDER: Final = "http://YOUR-SERVER/honed"
# Without a URL the page says where it was loaded from.
_SCRIPT: Final = """<script>
for (const each of document.querySelectorAll(".url"))
  each.textContent = new URL(".", location).href.replace(/[/]$/, "");
</script>"""


@dataclass(frozen=True, slots=True)
class Package:
    """A built package."""

    file: Path
    name: str
    version: str
    architecture: str  # or "all"


@dataclass(frozen=True, slots=True)
class Key:
    """What signs: a fingerprint in a folder of GnuPG's, None for the user's own."""

    fingerprint: str
    home: Path | None

    def environment(self) -> dict[str, str]:
        """In which gpg finds it."""
        return dict(os.environ) | ({"GNUPGHOME": str(self.home)} if self.home else {})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="make repo", description=__doc__)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where the packages are")
    parser.add_argument("-o", "--output", type=Path, help="the repository's folder (default: dist/repo)")
    parser.add_argument("--key", default="", help="fingerprint of a key of yours, in your GnuPG's folder")
    parser.add_argument("--url", default="", help="where it will be served, for its page")
    options = parser.parse_args(argv)
    output: Path = options.output or options.dist / "repo"
    for program, package in (("aptly", "aptly"), ("gpg", "gpg"), ("dpkg-deb", "dpkg")):
        if not shutil.which(program):
            _die(f"{program} is missing: sudo apt install {package}")
    os.umask(0o022)
    suites = {suite: _packages(_folder(options.dist, suite)) for suite in SUITES}
    suites = {suite: packages for suite, packages in suites.items() if packages}
    if not suites:
        _die(f"there are no packages in {options.dist}; build them: make deb, make deb ARCH=arm64")
    for suite, packages in suites.items():
        _check_whole(suite, packages)
        _check_unchanged(packages, output)
    new = output.with_name(f".{output.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    with _given(options.key) if options.key else _made() as key:
        _publish(suites, key, new)
        _gpg(key, "--armor", "--output", str(new / KEY_FILE), "--export", key.fingerprint)
    for path in new.rglob("*"):
        if path.is_symlink():  # by which aptly would know the index before; nobody asks for it
            path.unlink()
    (new / "index.html").write_text(page(suites, key.fingerprint, options.url.rstrip("/")))
    _exchange(new, output)
    print(f"{output} is signed by {key.fingerprint}")
    for suite, packages in suites.items():
        newest = max((each.version for each in packages), key=_by_version)
        print(f"  {suite}: {newest} for {', '.join(_architectures(packages))}, {len(packages)} packages")
    return 0


def _folder(dist: Path, suite: str) -> Path:
    return dist if suite == next(iter(SUITES)) else dist / suite


def _packages(folder: Path) -> list[Package]:
    shown = "${Package} ${Version} ${Architecture}"
    return [
        Package(file, *_told("dpkg-deb", "--show", f"--showformat={shown}", str(file)).split())
        for file in sorted(folder.glob("*.deb"))
    ]


def _architectures(packages: Sequence[Package]) -> list[str]:
    return sorted({each.architecture for each in packages} - {"all"}) or list(_BOARDS)


def _check_whole(suite: str, packages: Sequence[Package]) -> None:
    """Packages need others of the same version: each architecture must have the newest of all."""
    newest: dict[tuple[str, str], str] = {}
    for each in packages:
        key = each.name, each.architecture
        newest[key] = max(newest.get(key, each.version), each.version, key=_by_version)
    version = max(newest.values(), key=_by_version)
    behind = [f"{name} {old} ({arch})" for (name, arch), old in newest.items() if old != version]
    if behind:
        suite_option = "" if suite == next(iter(SUITES)) else f" SUITE={suite}"
        _die(
            f"{suite} has {version}, but {', '.join(sorted(behind))}; build the rest: "
            f"make deb{suite_option} ARCH=..."
        )


def _check_unchanged(packages: Sequence[Package], output: Path) -> None:
    """What has been published under a version stays so: apt would not fetch it again, or refuse it."""
    published = {path.name: path for path in (output / "pool").rglob("*.deb")}
    for each in packages:
        there = published.get(each.file.name)
        if there and not filecmp.cmp(there, each.file, shallow=False):
            _die(
                f"{each.file.name} is in {output} with other contents; raise the version in debian/changelog "
                f"and build again, or remove {output} if nobody has installed from it"
            )


@contextmanager
def _given(name: str) -> Iterator[Key]:
    """A key of the user's."""
    if not (found := _fingerprint(Key(name, None))):
        _die(f"gpg has no secret key {name!r}; gpg --list-secret-keys shows those there are")
    yield Key(found, None)


@contextmanager
def _made() -> Iterator[Key]:
    """The key that was made for repositories of this user, or a new one.

    It is kept as a file. gpg gets a folder with a short name: its agent's socket may have no longer one.
    """
    data = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local/share")
    kept = Path(data) / "honed/repository-key.asc"
    with tempfile.TemporaryDirectory(prefix="honed-key-") as home:
        key = Key("", Path(home))
        try:
            if kept.exists():
                _gpg(key, "--batch", "--import", str(kept))
            else:
                print(f"making the key {kept}: keep it safe, all who install will trust it")
                new = ("--quick-generate-key", "honed packages", "ed25519", "sign", "never")
                _gpg(key, "--batch", "--passphrase", "", *new)
                kept.parent.mkdir(parents=True, exist_ok=True)
                draft = kept.with_suffix(".new")
                draft.touch(mode=0o600)
                _gpg(key, "--batch", "--yes", "--armor", "--output", str(draft), "--export-secret-keys")
                draft.replace(kept)
            if not (found := _fingerprint(key)):
                _die(f"{kept} is no secret key; put the right one there")
            yield Key(found, key.home)
        finally:
            subprocess.run(["gpgconf", "--kill", "gpg-agent"], env=key.environment(), check=False)


def _fingerprint(key: Key) -> str:
    """Of the first secret key that the name fits, "" for none."""
    command = ["gpg", "--batch", "--with-colons", "--list-secret-keys"]
    command += [key.fingerprint] if key.fingerprint else []
    done = subprocess.run(command, env=key.environment(), capture_output=True, text=True, check=False)
    rows = (row.split(":") for row in done.stdout.splitlines())
    return next((row[9] for row in rows if row[0] == "fpr"), "")


def _publish(suites: Mapping[str, Sequence[Package]], key: Key, folder: Path) -> None:
    """Have aptly write and sign the repository; nothing of aptly's own is kept."""
    with tempfile.TemporaryDirectory(prefix="honed-repo-") as work:
        config = Path(work) / "aptly.conf"
        settings = {
            "rootDir": work,
            "gpgProvider": "gpg2",
            "FileSystemPublishEndpoints": {"out": {"rootDir": str(folder.resolve()), "linkMethod": "copy"}},
        }
        config.write_text(json.dumps(settings))

        def aptly(*arguments: str) -> None:
            command = ["aptly", f"-config={config}", *arguments]
            done = subprocess.run(
                command, env=key.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
            )
            if done.returncode:
                _die(f"aptly failed:\n{done.stdout.decode(errors='replace')}")

        for suite, packages in suites.items():
            aptly("repo", "create", suite)
            aptly("repo", "add", suite, *(str(each.file) for each in packages))
            aptly(
                "publish", "repo", "-acquire-by-hash", "-skip-contents", f"-distribution={suite}",
                "-component=main", "-origin=honed", "-label=honed",
                f"-architectures={','.join(_architectures(packages))}", f"-gpg-key={key.fingerprint}",
                suite, "filesystem:out:.",
            )  # fmt: skip


def page(suites: Mapping[str, Sequence[Package]], fingerprint: str, url: str) -> str:
    """The page that tells how to install from the repository."""
    found: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for suite, packages in suites.items():
        for each in packages:
            found[suite, each.name, each.version].append(each.architecture)
    rows = [_row(*what, ", ".join(architectures)) for what, architectures in found.items()]
    template = string.Template(Path(__file__).with_name("page.html").read_text())
    return template.substitute(
        suites=" and ".join(f"{SUITES[suite]} ({suite})" for suite in suites),
        url=html.escape(url or _PLACEHOLDER),
        fingerprint=fingerprint,
        rows="\n".join(rows),
        script="" if url else _SCRIPT,
    )


def _row(*cells: str) -> str:
    return "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"


def _exchange(new: Path, output: Path) -> None:
    """Put the new repository in the old one's place."""
    old = output.with_name(f".{output.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if output.exists():
        output.rename(old)
    new.rename(output)
    shutil.rmtree(old, ignore_errors=True)


def _compare(one: str, other: str) -> int:
    """Versions as dpkg orders them."""
    if one == other:
        return 0
    less = subprocess.run(["dpkg", "--compare-versions", one, "lt", other], check=False).returncode == 0
    return -1 if less else 1


_by_version = cmp_to_key(_compare)


def _gpg(key: Key, *arguments: str) -> None:
    done = subprocess.run(["gpg", *arguments], env=key.environment(), capture_output=True, check=False)
    if done.returncode:
        _die(f"gpg failed: {done.stderr.decode(errors='replace').strip()}")


def _told(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        _die(f"{command[0]} failed: {done.stderr.strip()}")
    return done.stdout


def _die(why: str) -> NoReturn:
    sys.exit(f"repo: {why}")


if __name__ == "__main__":
    raise SystemExit(main())
