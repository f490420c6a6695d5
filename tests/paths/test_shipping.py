"""Executors that have neither the package nor the user's modules, and how both get there."""

from __future__ import annotations

import pytest

from tests.paths.conftest import Walks

pytestmark = pytest.mark.timeout(3000)  # waits for all the cells of a master

SHIPPED = ("local-cluster", pytest.param("connect", marks=pytest.mark.newest))


@pytest.mark.parametrize("master", SHIPPED)
def test_executors_lack_what_nobody_has_shipped(walks: Walks, master: str) -> None:
    assert walks.result(master, "lacks") is None


@pytest.mark.parametrize("master", SHIPPED)
@pytest.mark.parametrize("what", ["package", "module"])
def test_a_fit_names_what_the_executors_lack_and_how_to_ship_it(walks: Walks, master: str, what: str) -> None:
    assert walks.result(master, f"told of the {what}") is None


@pytest.mark.parametrize("master", SHIPPED)
def test_code_that_came_with_a_model_is_loaded_where_it_is_absent(walks: Walks, master: str) -> None:
    assert walks.result("local", "private") is None
    assert walks.result(master, "private") is None


def test_spark_submit_ships_both(walks: Walks) -> None:
    assert walks.result("standalone", "shipped") is None


def test_a_fit_on_gpus_that_the_executors_lack_is_refused(walks: Walks) -> None:
    assert walks.result("local-cluster", "told of GPUs") is None
