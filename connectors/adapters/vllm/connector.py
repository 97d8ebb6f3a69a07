"""vLLM's connector interface over our tiers."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvcache.connectors.adapters.vllm import register
from kvcache.connectors.adapters.vllm.events import TierEvents
from kvcache.connectors.adapters.vllm.groups import CachedGroups, block_regions, cached_groups
from kvcache.connectors.adapters.vllm.records import StepPlan, StepResults
from kvcache.connectors.adapters.vllm.scheduler_side import SchedulerSide
from kvcache.connectors.adapters.vllm.settings import (
    DEFAULT_STATE_TOKENS,
    Settings,
    events_wanted,
    open_tiers,
    read_settings,
)
from kvcache.connectors.adapters.vllm.stats import Reporter, TierMetrics, TierReport
from kvcache.connectors.adapters.vllm.worker_side import WorkerSide
from kvcache.connectors.base import Connector
from kvcache.core.errors import ConfigError
from kvcache.core.events.records import MEDIUM_CPU
from kvcache.core.hashing import Fingerprint, root_digest

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

TESTED_VERSIONS = ("0.33.",)
"""vLLM's connector interface changes from one version to the next."""

CLOSE_SECONDS = 30.0
"""So long `shutdown` waits for a copy that runs."""


def require_version(version: str) -> None:
    """Raise `ConfigError` for a vLLM that this was not tested with."""
    if not version.startswith(TESTED_VERSIONS):
        raise ConfigError(
            f"this is vLLM {version}: kvcache's connector is made for"
            f" {', '.join(v + 'x' for v in TESTED_VERSIONS)}, whose interface differs; install that, or"
            " a kvcache made for yours"
        )


class _Shared:
    """One tier for both roles of an engine, which run in one process."""

    _lock = threading.Lock()
    _half: ClassVar[dict[str, list[tuple[Connector, KVConnectorRole]]]] = {}
    """By settings, those that one role has made and the other has not taken yet, in their order."""

    @classmethod
    def take(cls, key: str, role: KVConnectorRole, make: Callable[[], Connector]) -> Connector:
        """That which the other role has made, or a new one."""
        with cls._lock:
            half = cls._half.setdefault(key, [])
            if half and half[0][1] is not role:
                connector = half.pop(0)[0]
            else:
                connector = make()
                half.append((connector, role))
            if not half:
                del cls._half[key]
            return connector


class KVCacheConnector(KVConnectorBase_V1, SupportsHMA):
    """kvcache's tiers below vLLM's own block pool.

    Settings in `kv_connector_extra_config`:

    * `tiers`: a list, the upper one first: each `{"connector": NAME, ...}` with the options of that
      connector. NAME is that of an entry point (`kvcache doctor` lists them) or "package.module:Class".
    * `store`: "all" (the default), or "prompt": blocks with generated tokens are not stored.
    * `load`: "async" (the default), or "sync": the step waits for loads. Models with full attention alone,
      and without asynchronous scheduling.
    * `weights_epoch`: another number for other weights under the same name.

    Raises:
        ConfigError: another version of vLLM, a setting or a model that is not supported.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        require_version(vllm.__version__)
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._settings = settings = read_settings(extra)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._tier: Connector | None = None
        self._events: TierEvents | None = None
        self._reporter = Reporter()
        if not vllm_config.cache_config.enable_prefix_caching:
            logger.warning("prefix caching is off: blocks have no hashes, and nothing is stored")
            return
        self._groups = cached_groups(kv_cache_config, vllm_config)
        _require_supported(vllm_config, kv_cache_config, self._groups, settings)
        self._fingerprint = _fingerprint(vllm_config, settings)
        key = json.dumps([self._kv_transfer_config.engine_id, extra], sort_keys=True, default=str)
        self._tier = _Shared.take(key, role, self._open)
        if self._tier.medium != MEDIUM_CPU:
            self._cache_hit_source = CacheHitSource.DISK
        if role is KVConnectorRole.WORKER:
            if settings.wait_for_loads and self._tier.worker.slot_regions is None:
                raise ConfigError(
                    'load "sync" needs a tier in host memory above the others: put'
                    ' {"connector": "cpu", ...} first in tiers'
                )
            self._worker = WorkerSide(
                self._tier.worker,
                wait=settings.wait_for_loads,
                by_block=_told_by_block(kv_cache_config, self._groups),
            )
        elif self._kv_transfer_config.kv_load_failure_policy == "fail":
            logger.warning(
                'kv_load_failure_policy is "fail": a page that cannot be loaded ends its request with'
                ' an error; set "recompute"'
            )

    def _open(self) -> Connector:
        config, cache = self._kv_cache_config, self._vllm_config.cache_config
        interval = config.prefix_cache_retention_interval
        states = [group.span for group in self._groups.groups if group.rules.kind == "state"]
        if interval is None and states:
            interval = max(states)
        backend = getattr(self._vllm_config.attention_config, "backend", None)
        return open_tiers(
            self._settings,
            self._groups.geometry,
            fingerprint=self._fingerprint,
            layout=f"vllm {vllm.__version__} {config.kv_cache_layout} {backend or 'auto'}",
            hash_name=cache.prefix_caching_hash_algo,
            events=events_wanted(self._vllm_config),
            state_tokens=interval or DEFAULT_STATE_TOKENS,
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a store that is lost is a miss later."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003
        """False: the tier's worker knows its blocks by their addresses, once."""
        return False

    def shutdown(self) -> None:
        """End transfers and close the tiers. Idempotent."""
        if self._tier is not None and not self._tier.worker.close(CLOSE_SECONDS):
            logger.error("a copy did not end within %s s", CLOSE_SECONDS)

    # ---- worker --------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Where vLLM's blocks lie."""
        if self._tier is not None:
            regions = block_regions(self._kv_cache_config, kv_caches)
            self._tier.worker.register(regions)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Begin the step's loads; with `load` "sync", end them."""
        if self._worker is not None:
            self._worker.load(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are whole."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: stores are whole."""

    def wait_for_save(self) -> None:
        """Begin the step's stores."""
        if self._worker is not None:
            self._worker.store(self._step)

    @property
    def _step(self) -> StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        return plan

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """Requests whose load has ended, each once."""
        results = KVConnectorTransferResults()
        if self._worker is not None:
            results.finished_recving, results.failed_recving = self._worker.collect()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Of models with one group of full attention; of others whole requests are told as failed."""
        return self._worker.take_bad_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> StepResults | None:
        """For the scheduler's side."""
        return self._worker.take_results() if self._worker is not None else None

    # ---- scheduler -----------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """The block pool exists: lookups may begin."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._tier is None:
            return
        if events_wanted(self._vllm_config):
            self._events = TierEvents(self._groups, self._tier.medium)
        self._scheduler = SchedulerSide(
            self._tier.scheduler,
            self._groups,
            self._namespace(b""),
            drop_tokens=_drop_tokens(self._vllm_config, self._groups),
            prompt_only=self._settings.prompt_only,
            wait=self._settings.wait_for_loads,
            ranks=self._vllm_config.parallel_config.world_size,
            manager=kv_cache_manager,
            told=self._events.tell if self._events else None,
        )

    def _namespace(self, since: bytes) -> bytes:
        """Whose keys these are. `since`: of the last reset; pages from before it are not found."""
        algorithm = self._vllm_config.cache_config.prefix_caching_hash_algo
        root = root_digest(
            self._fingerprint, hash_unit_tokens=self._groups.hash_tokens, salt=f"vllm {algorithm}"
        )
        return hashlib.sha256(root + since).digest()

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens the tiers have behind those on the device."""
        if self._scheduler is None or request.skip_reading_prefix_cache:
            return 0, False
        tokens = self._scheduler.lookup(request, num_computed_tokens)
        return tokens, bool(tokens) and not self._settings.wait_for_loads

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The request got its blocks."""
        if self._scheduler is not None:
            self._scheduler.start_load(request, blocks.blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepPlan:
        """What is to be moved in this step."""
        return self._scheduler.plan(scheduler_output) if self._scheduler else StepPlan()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What has ended."""
        results = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(results, StepResults):
            self._scheduler.take(results)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Its blocks may go: those that are stored are held by references of our own."""
        if self._scheduler is not None:
            self._scheduler.finish(request, block_ids)
        return False, None

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished_all_groups`, of a model with one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def register_finished_partial_tail(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],  # noqa: ARG002
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        """States that the request leaves. False: its blocks need not be kept."""
        if self._scheduler is not None:
            self._scheduler.finish_states(request, partial_tail_offloads)
        return False

    def has_pending_push_work(self) -> bool:
        """Whether steps are wanted without requests: results are to be heard."""
        return self._scheduler is not None and self._scheduler.pending

    def reset_cache(self) -> bool:
        """Nothing of what is stored is found any more. False: loads are in flight."""
        if self._scheduler is None:
            return True
        return self._scheduler.reset(self._namespace(secrets.token_bytes(32)))

    def take_events(self) -> Iterable[KVCacheEvent]:
        """What became visible in the tiers, and what went."""
        if self._scheduler is None or self._events is None or self._tier is None:
            return ()
        return list(self._events.events(self._scheduler.tier.take_events()))

    # ---- stats ---------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> TierReport | None:
        """Of the scheduler's side, which knows all."""
        if self._scheduler is None:
            return None
        stats = self._scheduler.tier.stats()
        stats.unknown_ids += self._scheduler.unknown
        stats.dropped_store_pages += self._scheduler.stores.gone_blocks
        return self._reporter.report(stats)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TierReport:
        """From what `TierReport.to_dict` gave."""
        return TierReport(data if data is not None else {"counters": {}, "gauges": {}})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> TierMetrics:
        """In vLLM's front-end."""
        return TierMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _require_supported(
    vllm_config: Any, config: KVCacheConfig, groups: CachedGroups, settings: Settings
) -> None:
    parallel = vllm_config.parallel_config
    if parallel.world_size > 1 or parallel.distributed_executor_backend not in (None, "uni"):
        raise ConfigError(
            f"{parallel.world_size} workers with the {parallel.distributed_executor_backend!r} executor:"
            " so far scheduler and worker must run in one process (tensor and pipeline parallel size 1,"
            " --distributed-executor-backend uni)"
        )
    if settings.wait_for_loads and not _told_by_block(config, groups):
        kinds = ", ".join(group.kind for group in groups.groups)
        raise ConfigError(
            f'load "sync" with cache groups of {kinds}: vLLM can be told of what failed only where there is'
            ' one group, of full attention; leave "load" out'
        )
    if settings.wait_for_loads and vllm_config.scheduler_config.async_scheduling:
        raise ConfigError(
            'load "sync" with asynchronous scheduling: vLLM would go on from a load that has failed before'
            ' it hears of it; set --no-async-scheduling, or leave "load" out'
        )


def _told_by_block(config: KVCacheConfig, groups: CachedGroups) -> bool:
    """Whether what lies before the first block that failed can be gone on from, and vLLM does it."""
    return len(config.kv_cache_groups) == 1 and groups.groups[0].rules.kind == "full"


def _fingerprint(vllm_config: Any, settings: Settings) -> Fingerprint:
    """What of the configuration changes the bytes of a block."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    overrides = json.dumps(model.hf_overrides, sort_keys=True, default=str)
    position = json.dumps(
        getattr(model.hf_config, "rope_parameters", None), sort_keys=True, default=str
    )
    return Fingerprint(
        model=f"{model.model}@{model.revision} {model.quantization} {overrides}",
        weights_epoch=settings.weights_epoch,
        kv_dtype=f"{model.dtype} {cache.cache_dtype}",
        position_scheme=position,
    )


def _drop_tokens(vllm_config: Any, groups: CachedGroups) -> int:
    """What a hit must leave out for draft layers that write their last block anew."""
    speculative = vllm_config.speculative_config
    if speculative is None or vllm_config.num_hash_lookahead_tokens:
        return 0
    return groups.align_tokens if speculative.use_eagle_block_drop() else 0


register()
