"""The connector author's kit: contract suite, fault injection, oracle. Needs no test framework."""

from kvcache.connectors.testing.contract import CONTRACT, POOL_RULES
from kvcache.connectors.testing.events import Follower
from kvcache.connectors.testing.faults import FAULT_KINDS, Faults, FaultyWorker, with_faults
from kvcache.connectors.testing.harness import (
    ContractError,
    Device,
    Factory,
    Gate,
    Key,
    Rig,
    Setup,
    chain,
    content,
    digest,
    expect,
    rig,
)
from kvcache.connectors.testing.oracle import OracleTier
from kvcache.connectors.testing.randomized import RandomRun, under_fault

__all__ = [
    "CONTRACT",
    "FAULT_KINDS",
    "POOL_RULES",
    "ContractError",
    "Device",
    "Factory",
    "Faults",
    "FaultyWorker",
    "Follower",
    "Gate",
    "Key",
    "OracleTier",
    "RandomRun",
    "Rig",
    "Setup",
    "chain",
    "content",
    "digest",
    "expect",
    "rig",
    "under_fault",
    "with_faults",
]
