"""`slipstream k8s render`: from the one configuration file to the manifests that KubeRay and Kubernetes are given."""
