"""`slipstream k8s render`: manifests for KubeRay and Kubernetes, rendered from the configuration file.

`rendering.py` is the entry point, checks the configuration and makes the volume of the weights. `ray_service.py` makes
the RayService with its worker groups and pods.
"""
