"""The dev-cpu overlay run by podman and disturbed under load: `make k8s-run`."""
