"""The port on which a store listens."""

from __future__ import annotations

import pytest

from sparktorch.distributed.store import host_store
from sparktorch.errors import ConfigError
from tests.support.proxy import free_port


def test_a_store_takes_the_first_free_port_of_the_range_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_port()
    monkeypatch.setenv("SPARKTORCH_PORTS", f"{first}-{first + 30}")
    (one, taken), (two, next_one) = host_store("127.0.0.1"), host_store("127.0.0.1")
    assert taken == one.port == first
    assert first < next_one == two.port <= first + 30

    monkeypatch.setenv("SPARKTORCH_PORTS", str(first))
    with pytest.raises(OSError, match="in use"):
        host_store("127.0.0.1")


@pytest.mark.parametrize("given", ["some", "40001-40000", "-40000"])
def test_what_is_no_range_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("SPARKTORCH_PORTS", given)
    with pytest.raises(ConfigError, match="is no range of ports"):
        host_store("127.0.0.1")
