"""A worker without a model: the shipped service around a runner that makes tokens up."""
