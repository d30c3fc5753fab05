"""Image and manifest templates for `slipstream k8s render`; a Python package, so that they are installed."""
