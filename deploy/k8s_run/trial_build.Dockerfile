# Does what Quire's own images do first, in small: a build in which this fails says nothing about them.
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm
FROM ${PYTHON_IMAGE}
ARG PACKAGE
RUN python3 -m venv /trial && /trial/bin/pip install --no-cache-dir --no-deps "${PACKAGE}"
