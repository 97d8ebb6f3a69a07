"""The verbs of the command line, one module each, imported by `kvcache.cli` when chosen."""
