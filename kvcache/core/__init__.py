"""The core: specs, layout, hashing, pool, manager, native binding."""
