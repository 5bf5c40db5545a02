"""The image, the network and the rows of `make containers`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.containers import oci
from tests.containers.cluster import Cluster
from tests.containers.image import Image, built
from tests.containers.pods import make_network
from tests.containers.rows import BUILD, ROWS, missing


@pytest.fixture(scope="session")
def image() -> Iterator[Image]:
    if why := missing():
        pytest.skip(why)
    if os.getpid() != 1:
        pytest.skip("has to be alone in its namespaces: make containers")
    subprocess.run("mount -t tmpfs none /run && mkdir /run/netns", shell=True, check=True)
    make_network()
    oci.make_cgroups()
    yield built(BUILD)
    oci.remove_cgroups()


@pytest.fixture
async def cluster(image: Image, directory: Path) -> AsyncIterator[Cluster]:
    """Nothing of it runs yet."""
    async with Cluster(image, directory) as made:
        yield made


@pytest.fixture
def directory(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Below build/: others than root must come in, and pods' names are made from its name."""
    place = BUILD / request.node.name.removeprefix("test_")[:40]
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    yield place
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture(scope="session")
def record() -> Callable[..., None]:
    """`record(key, told=s, whole=s, said=...)`: what a row of the table shows."""

    def keep(key: str, **facts: Any) -> None:
        rows = json.loads(ROWS.read_text()) if ROWS.exists() else {}
        rows[key] = {name: round(fact, 1) if isinstance(fact, float) else fact for name, fact in facts.items()}
        rows[key] |= {"day": f"{datetime.now(UTC):%Y-%m-%d}", "load": round(os.getloadavg()[0])}
        ROWS.write_text(json.dumps(rows, indent=1))

    return keep
