"""Trace readers, replay and microbenchmarks behind the `kvcache` command line."""

if not __name__.startswith("kvcache."):
    raise ImportError("import kvcache.bench, not bench: the folder is part of the kvcache package")
