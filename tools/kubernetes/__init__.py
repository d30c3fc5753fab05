"""`slipstream k8s render`: manifests for KubeRay and Kubernetes, rendered from the configuration file.

`rendering.py` is the entry point and checks the configuration. `ray_service.py` makes the RayService, with worker
groups from `pool_groups.py` and pods from `pod_templates.py`; `weights_volume.py` makes the volume of the weights.
"""
