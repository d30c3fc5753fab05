"""Manifests that `slipstream k8s render` builds on, and the image; a package so that they are installed with it."""
