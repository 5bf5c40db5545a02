#!/usr/bin/env python3
"""Name the image's base by its digest: ask the registry for the tag in the Containerfile, write the digest behind it.

Run it where the registry can be reached; again, to take a newer base of the same tag. The digest is computed from what
the registry serves (an index of all architectures), not believed. Exit code 1, with one line: nothing was changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

CONTAINERFILE = Path(__file__).with_name("Containerfile")
FROM = re.compile(
    r"^FROM (?P<host>[^/\s]+)/(?P<name>[^:@\s]+):(?P<tag>[^@\s]+)(?P<digest>@sha256:[0-9a-f]{64})?$", re.M
)
#: Where the images of docker.io are.
REGISTRIES = {"docker.io": "https://registry-1.docker.io"}
_ACCEPT = "application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json"
_TIMEOUT_S = 20.0


class NoDigest(Exception):
    """The registry gave no digest; the message says why."""


def digest_of(registry: str, name: str, tag: str) -> str:
    """Return sha256:HEX of the index that a tag stands for. Raises NoDigest, OSError."""
    url = f"{registry}/v2/{name}/manifests/{tag}"
    try:
        body, claim = _get(url, {"Accept": _ACCEPT})
    except urllib.error.HTTPError as error:
        if error.code != 401:
            raise
        body, claim = _get(url, {"Accept": _ACCEPT, "Authorization": f"Bearer {_token(error)}"})
    if "manifests" not in json.loads(body):
        raise NoDigest(f"{url} returned no image index")
    digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
    if claim not in ("", digest):
        raise NoDigest(f"{url} returned {digest}, and the registry claims {claim}")
    return digest


def _get(url: str, headers: dict[str, str]) -> tuple[bytes, str]:
    """Return the body, and the digest that the registry claims for it ("": none)."""
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT_S) as answer:
        return answer.read(), answer.headers.get("Docker-Content-Digest", "")


def _token(refusal: urllib.error.HTTPError) -> str:
    """Return the token of an anonymous reader, from where the registry sends one."""
    fields = dict(re.findall(r'(\w+)="([^"]*)"', refusal.headers.get("WWW-Authenticate", "")))
    if "realm" not in fields:
        raise NoDigest("the registry wants a login")
    body, _ = _get(f"{fields.pop('realm')}?{urllib.parse.urlencode(fields)}", {})
    return str(json.loads(body)["token"])


def main() -> int:
    """Write the digest into the Containerfile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--registry", metavar="URL", help="ask this one (a mirror) in the place of the image's own")
    parser.add_argument(
        "--file", type=Path, default=CONTAINERFILE, help="default: the Containerfile beside this program"
    )
    options = parser.parse_args()
    text = options.file.read_text()
    base = FROM.search(text)
    if base is None:
        print(f"{options.file}: no line FROM HOST/NAME:TAG; nothing was changed", file=sys.stderr)
        return 1
    registry = options.registry or REGISTRIES.get(base["host"], f"https://{base['host']}")
    try:
        digest = digest_of(registry.rstrip("/"), base["name"], base["tag"])
    except (NoDigest, OSError, ValueError, KeyError) as error:
        print(f"{registry}: no digest of {base['name']}:{base['tag']} ({error}); nothing was changed", file=sys.stderr)
        return 1
    line = f"FROM {base['host']}/{base['name']}:{base['tag']}@{digest}"
    options.file.write_text(text[: base.start()] + line + text[base.end() :])
    print(line + (" (as before)" if base["digest"] == f"@{digest}" else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
