"""The bundled engine: models over paged storage, scheduler, runners.

Import the module that holds what you need; importing this package loads nothing, so that torch is
loaded only by those who compute.
"""
