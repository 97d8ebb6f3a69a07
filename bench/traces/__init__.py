"""Readers of request traces: no text, only times, lengths and the identity of blocks."""

from kvcache.bench.traces.base import TraceRequest
from kvcache.bench.traces.lanes import LaneSettings
from kvcache.bench.traces.live import Arrivals
from kvcache.bench.traces.trace_file import TraceFile, open_trace

__all__ = ["Arrivals", "LaneSettings", "TraceFile", "TraceRequest", "open_trace"]
