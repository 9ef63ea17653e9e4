"""Checks of the Kubernetes manifests without a cluster: `make k8s-check`."""
