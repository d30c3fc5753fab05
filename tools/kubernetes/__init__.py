"""`slipstream k8s render`: renders manifests for KubeRay and Kubernetes from the configuration file.

`rendering.py` is the entry point; it checks the configuration and renders the volume of the weights. `ray_service.py`
renders the RayService with its worker groups and pods.
"""
