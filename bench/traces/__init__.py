"""Readers of request traces: no text, only times, lengths and the identity of blocks."""

from kvcache.bench.traces.base import TraceRequest
from kvcache.bench.traces.lanes import LaneSettings
from kvcache.bench.traces.trace_file import TraceFile, open_trace

__all__ = ["LaneSettings", "TraceFile", "TraceRequest", "open_trace"]
