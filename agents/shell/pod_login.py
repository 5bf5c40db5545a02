"""`unicron-agent --pod-login URL`: exchange a pod's token for the key of its node, in an init container.

Rules
-----
* The key is made here, once; its public part alone goes to the head, beside the token that Kubernetes gave this pod.
  The head answers with the node that this pod is, and in TLS with what else the key carries (certificate, CA).
* A key that is there already stays: a container that starts again asks for nothing.
* While the head or its API server is away, the request is repeated, less and less often, with one line for each new
  reason. A refusal ends the program with exit code 1: Kubernetes starts the init container again, and shows the line.
* Whoever the token is shown to could use it until it ends (ten minutes): over https:// alone the CA says who that is.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import ssl
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from unicrond.events.cli.command_line import SettableParser, add, fail, option, run
from unicrond.events.cli.completion import COMPLETE_VARIABLE
from unicrond.events.host.kubernetes_account import POD_LOGINS
from unicrond.events.trust.keys import BadKey, Key, make_key, read_key, rewrite_key
from unicrond.events.trust.logins import BadLogin, agent_login
from unicrond.events.trust.tls import BadCa, client_context, trouble

RETRY_S, RETRY_MAX_S = 0.5, 8.0
ANSWER_S = 15.0
#: HTTP statuses of a head that gives the key later: too many requests, not ready.
_LATER = (429, 503)
_ANSWER_BYTES_MAX = 65_536


class PodLoginRefused(Exception):
    """The head gives no key; one line."""


class _HeadAway(Exception):
    """The head does not answer, or gives the key later; one line."""


def is_asked(argv: Sequence[str]) -> bool:
    """Return whether a command line exchanges a token."""
    words = [word.partition("=")[0] for word in argv]
    return COMPLETE_VARIABLE not in os.environ and "--pod-login" in words and not {"-h", "--help"} & {*words}


def main(argv: Sequence[str] | None = None) -> int:
    """Exchange the token from the command line; return the exit code: 0 done, 1 refused, 2 bad usage."""
    return run("unicron-agent", lambda: _exchange(argv))


def _exchange(argv: Sequence[str] | None) -> int:
    parser = SettableParser(prog="unicron-agent", add_help=False)
    add(
        parser,
        option("--pod-login", "URL", "", required=True),
        option("--pod-token", "FILE", "", type=Path, required=True),
        option("--key", "FILE", "", type=Path, required=True),
        option("--tls-ca", "FILE", "", type=Path),
    )
    # The flags of the agent itself may stand beside it: a manifest may say them once for both.
    arguments, _ = parser.parse_known_args(argv)
    url, path = urlsplit(arguments.pod_login), arguments.key
    if url.scheme not in ("http", "https") or not url.hostname or url.path.strip("/"):
        return fail("unicron-agent", f"--pod-login: {arguments.pod_login!r} is not like https://unicron-head:7470", 2)
    if path.exists():
        try:
            print(f"{path} holds the key of {read_key(path).login} already")
        except BadKey as error:
            return fail("unicron-agent", f"--key: {error}; remove it")
        return 0
    key, last_reason, retry_s = make_key(agent_login("pod")), "", RETRY_S  # which node it is, the head says
    while True:
        try:
            node = enroll(key, arguments.pod_login, arguments.pod_token, path, arguments.tls_ca)
        except _HeadAway as error:
            if str(error) != last_reason:
                print(f"no key yet: {error}", file=sys.stderr, flush=True)
            last_reason = str(error)
            time.sleep(retry_s * random.uniform(0.5, 1.0))  # all pods of a cluster may wait for one head
            retry_s = min(2 * retry_s, RETRY_MAX_S)
        except (PodLoginRefused, BadCa) as error:
            return fail("unicron-agent", f"--pod-login: {error}")
        else:
            print(f"{path} holds the key of {agent_login(node)}")
            return 0


def enroll(key: Key, url: str, token_file: Path, path: Path, ca: Path | None) -> str:
    """Have the head enroll this pod with the key, write it to `path`, and return the node that the pod is. Raise
    PodLoginRefused, _HeadAway, BadCa."""
    try:
        token = token_file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise PodLoginRefused(f"cannot read {token_file}: {getattr(error, 'strerror', None) or error}") from None
    status, answer = _post(url, token, {"key": key.user.key}, ca)
    if status >= 400:
        text = str(answer.get("error", ""))[:500] or f"HTTP {status}"
        raise _HeadAway(text) if status in _LATER else PodLoginRefused(text)
    try:
        node, pem = str(answer["node"]), str(answer["pem"])
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        rewrite_key(path, key._replace(login=agent_login(node), pem=pem))
    except (KeyError, BadLogin) as error:
        raise PodLoginRefused(f"{url} answers, but not like a head of this version ({error!r})") from None
    except OSError as error:
        raise PodLoginRefused(f"cannot write {path}: {error.strerror}") from None
    return node


def _post(url: str, token: str, body: dict[str, str], ca: Path | None) -> tuple[int, dict[str, Any]]:
    """Return the status and the JSON of the head's answer. Raise _HeadAway, PodLoginRefused, BadCa."""
    parts = urlsplit(url)
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        tls = client_context(ca)
        connection = http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=ANSWER_S, context=tls)
    else:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=ANSWER_S)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    try:
        connection.request("POST", POD_LOGINS, json.dumps(body).encode(), headers)
        response = connection.getresponse()
        answer = json.loads(response.read(_ANSWER_BYTES_MAX))
    except ssl.SSLCertVerificationError as error:
        trusts = f"the CA in {ca}" if ca else ""
        raise PodLoginRefused(trouble(error, url, trusts=trusts, remedy="give the head's CA as --tls-ca")) from None
    except ValueError:
        raise PodLoginRefused(f"{url} answers, but not like a head; check the address") from None
    except (OSError, http.client.HTTPException) as error:
        raise _HeadAway(f"no answer from {url}: {getattr(error, 'strerror', None) or error!r}") from None
    finally:
        connection.close()
    return response.status, answer if isinstance(answer, dict) else {}


if __name__ == "__main__":
    sys.exit(main())
