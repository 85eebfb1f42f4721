"""Integrations with training frameworks: a module for each framework, to be imported by its name.

``shoal.frameworks.transformers`` has a Trainer, ``shoal.frameworks.accelerate`` an Accelerator,
``shoal.frameworks.lightning`` a strategy for Lightning's Trainer. Each needs its own package, and nothing else of Shoal
needs any of them.
"""
