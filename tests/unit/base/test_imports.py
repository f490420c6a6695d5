"""Imports without garbage collection."""

from __future__ import annotations

import gc
from contextlib import suppress

import pytest

from sparktorch.base.imports import uncollected


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_off_within_and_then_as_it_was(enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with suppress(ImportError), uncollected():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
