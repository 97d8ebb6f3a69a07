"""What an engine may get wrong with an `Offload`: said by name, and nothing is left behind."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from tiers.stamp_engine import GEOMETRY, PATIENCE, Engine, engine, text

from kvcache.connectors.base import PageRegion
from kvcache.connectors.cpu import CpuConnector
from kvcache.connectors.driver import Offload
from kvcache.core.errors import ConfigError, InvariantError, MisuseError
from kvcache.core.manager import Manager
from kvcache.core.records import Grant
from kvcache.retention import Dense


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, None, "manager is None: give a Manager"),
        (1, None, "connector is None: give a Connector"),
        (2, None, "regions is None: give a list of PageRegion"),
        (2, [np.zeros(3)], r"regions has array\(.*: give a list of PageRegion"),
    ],
)
def test_parts_of_a_wrong_type_are_named(place: int, value: Any, message: str) -> None:
    with engine() as e:
        e.offload.close(PATIENCE)
        parts: list[Any] = [e.manager, CpuConnector(GEOMETRY, pages=(8, 4)), e.regions()]
        parts[place] = value
        with pytest.raises(ConfigError, match=message):
            Offload(*parts)


@pytest.mark.parametrize("value", [None, "64", 64.0, True])
@pytest.mark.parametrize("field", ["address", "page_bytes", "pages", "stride_bytes"])
def test_a_region_is_made_of_whole_numbers(field: str, value: Any) -> None:
    sizes = {"address": 64, "page_bytes": 64, "pages": 4, "stride_bytes": 64, field: value}
    with pytest.raises(ConfigError, match=rf"PageRegion\.{field} is .*: it must be a whole number"):
        PageRegion(**sizes)


def test_what_a_request_is_given_is_checked_by_name() -> None:
    with engine() as e:
        handle = e.manager.open(text(0, 9))
        with pytest.raises(
            ConfigError, match=r"grant is None: give the Grant that Manager\.allocate"
        ):
            e.offload.start_load(handle, None)  # type: ignore[arg-type]
        for call in (e.offload.lookup, e.offload.release, e.offload.forget):
            for wrong in (None, [handle], "1"):
                with pytest.raises(ConfigError, match=r"handle is .*: it must be a whole number"):
                    call(wrong)  # type: ignore[operator]
        for wait in (e.offload.wait, e.offload.drain, e.offload.close):
            with pytest.raises(ConfigError, match="timeout_seconds is None"):
                wait(None)  # type: ignore[arg-type]
        e.manager.abort(handle)


# ---- one for each manager --------------------------------------------------------------------------


def test_a_second_offload_of_a_manager_waits_for_the_end_of_the_first() -> None:
    with engine() as e:
        other = CpuConnector(GEOMETRY, pages=(8, 4))
        with pytest.raises(MisuseError, match="another Offload of this manager is open"):
            Offload(e.manager, other, e.regions())
        prompt = text(0, 9)
        e.serve(prompt)
        assert e.offload.stats().stored_pages > 0
        assert e.offload.close(PATIENCE)
        e.offload = second = Offload(e.manager, other, e.regions())
        e.serve(text(1, 9))
        assert second.stats().stored_pages > 0


def test_an_offload_that_is_gone_is_in_nobodys_way() -> None:
    manager = Manager(GEOMETRY, slabs=2, retention=Dense())
    with engine(slabs=2) as e:
        first = Offload(manager, CpuConnector(GEOMETRY, pages=(8, 4)), e.regions())
        with pytest.raises(ConfigError, match="0 regions for 2 groups"):
            Offload(manager, CpuConnector(GEOMETRY, pages=(8, 4)), [])  # and leaves nothing behind
        del first
        gc.collect()
        assert Offload(manager, CpuConnector(GEOMETRY, pages=(8, 4)), e.regions()).close(PATIENCE)


# ---- loads that are granted and not started --------------------------------------------------------


def granted(e: Engine) -> tuple[int, Grant]:
    """A request whose grant names a load."""
    prompt = text(0, 21)
    e.serve(prompt)
    e.manager.clear()
    handle = e.open(prompt, output=1)
    assert e.offload.lookup(handle)
    grant = e.allocate(handle, 1)
    assert grant
    assert grant.load
    return handle, grant


@pytest.mark.parametrize("how", ["abort", "preempt", "finish"])
def test_a_load_that_was_never_started_ends_when_its_request_leaves(how: str) -> None:
    with engine() as e:
        handle, _ = granted(e)
        e.check()
        e.close(handle, how)
        e.check()
        assert e.manager.stats().open_loads == 1
        assert e.poll() == []
        assert e.manager.stats().open_loads == 0
        if how == "preempt":
            assert e.run(handle).hits[-1].hit_tokens == 20
        e.assert_idle()


def test_draining_and_closing_end_a_load_that_was_never_started() -> None:
    for end in (lambda e: e.offload.drain(PATIENCE), lambda e: e.offload.close(PATIENCE)):
        with engine() as e:
            handle, _ = granted(e)
            e.close(handle, "abort")
            assert end(e)
            e.assert_idle()


def test_a_load_may_be_started_though_its_lookup_was_dropped() -> None:
    """Nothing is loaded then that the tier did not promise to keep: it may fail, and is counted once."""
    with engine() as e:
        handle, grant = granted(e)
        e.offload.release(handle)
        e.offload.release(handle)
        e.requests[handle].state = "loading"
        assert e.offload.start_load(handle, grant)
        e.check()
        e.settle()
        e.run(handle)
        e.assert_idle()


def test_a_load_that_the_engine_ends_itself_is_not_ended_twice() -> None:
    with engine() as e:
        handle, grant = granted(e)
        e.offload.release(handle)
        e.manager.end_load(grant.load, np.zeros(grant.load_pages, np.uint8))
        assert e.poll() == []
        e.close(handle, "abort")
        e.assert_idle()


@pytest.mark.parametrize("how", ["abort", "preempt", "finish"])
def test_check_notices_a_load_that_nobody_can_end_any_more(how: str) -> None:
    with engine() as e:
        handle, grant = granted(e)
        e.close(handle, how, told=False)
        with pytest.raises(InvariantError, match="1 loads are open in the manager, 0 are known"):
            e.offload.check()
        e.manager.end_load(grant.load, np.zeros(grant.load_pages, np.uint8))
        e.offload.forget(handle)
        e.offload.check()
